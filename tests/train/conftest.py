"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardtune.config.schema import ParallelSection
from shardtune.parallel.processes import Processes, join


@pytest.fixture
def processes() -> Iterator[Processes]:
    with join(ParallelSection(device="cpu")) as joined:
        yield joined
    if dist.is_initialized():
        dist.destroy_process_group()
