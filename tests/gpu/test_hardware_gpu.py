"""What NVML says of a real card."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from shardtune.observe.hardware import describe_hardware
from shardtune.observe.hardware_page import show_hardware

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_real_card_is_described() -> None:
    facts = json.loads(json.dumps(describe_hardware()))
    card = facts["gpus"][0]
    assert "H200" in card["name"]
    assert card["memory"] > 130 * 2**30
    assert facts["driver"] and facts["cuda"]["driver"] and facts["cuda"]["torch"] == torch.version.cuda
    assert card["ecc"]["enabled"] in (True, False)
    assert 0 < card["clocks"]["sm_mhz"] <= card["clocks"]["sm_max_mhz"]
    assert facts["nccl"]
    show_hardware(Console(width=80), facts)
