from __future__ import annotations

import json
import platform

import peft
import torch
import transformers

from shardtune.observe.environment import describe


def test_the_versions_are_those_that_run_and_can_be_written_as_json() -> None:
    described = json.loads(json.dumps(describe()))
    packages = described["packages"]
    assert packages["transformers"] == transformers.__version__
    assert packages["peft"] == peft.__version__
    assert packages["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert described["python"] == platform.python_version()
    assert described["cpus"] >= 1
    assert len(described["gpus"]) == torch.cuda.device_count()


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: object) -> None:
    assert None not in describe()["packages"].values()  # type: ignore[attr-defined]
