from __future__ import annotations

import json
import platform

import peft
import pytest
import torch
import transformers

from shardtune.observe.environment import command_line, describe


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


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/venv/bin/shardtune", "train", "run.yaml", "-o", "lora.r=8"], "shardtune train run.yaml -o lora.r=8"),
        (["/lib/shardtune/__main__.py", "train", "a b.yaml"], "shardtune train 'a b.yaml'"),
        (["sft.py", "--lr", "1e-4"], "python sft.py --lr 1e-4"),
        (["sft.py", "--hub-token", "abc", "--api_key=def"], "python sft.py --hub-token '***' '--api_key=***'"),
        (["shardtune", "train", "r.yaml", "-o", "train.hub_token=abc"], "shardtune train r.yaml -o 'train.hub_token=***'"),
        (["shardtune", "train", "https://me:secret@host/run.yaml"], "shardtune train 'https://***@host/run.yaml'"),
    ],
)  # fmt: skip
def test_the_command_reads_as_it_was_typed_without_secrets(argv: list[str], shown: str) -> None:
    assert command_line(argv) == shown
