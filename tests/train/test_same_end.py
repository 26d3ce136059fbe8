"""Two hundred steps of the fast path and of its eager twin, through the real run, end at the same evaluation loss."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupted import run
from running import events
from toys import WORDS, toy_config, toy_llama

EAGER = ("train.kernels=eager",)
FAST = ("train.fused_lora=true", "train.fused_loss=true", "train.compile=true")


def counting_rows(folder: Path) -> Path:
    """A rule that adapters of a random model can learn: the words in their order, from any of them on."""
    folder.mkdir()
    for name, firsts in (("train", range(60)), ("validation", range(2, 60, 7))):
        lines = []
        for first in firsts:
            for length in (3, 5, 8) if name == "train" else (6,):
                words = [WORDS[(first + n) % len(WORDS)] for n in range(length + 1)]
                lines.append(json.dumps({"question": words[0], "answer": " ".join(words[1:])}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_two_hundred_steps_end_where_the_eager_twin_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is noise is what another seed (other adapters to begin with, another order of rows) makes of it."""
    # Layers are traced and differentiated as for any backend; generating code for them takes a minute on two cores.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = toy_config(
        tmp_path,
        toy_llama(tmp_path / "model", hidden=64),
        counting_rows(tmp_path / "data"),
        lora={"r": 8, "target_modules": "all-linear"},
        data={"val_split": "validation"},
        train={
            "max_steps": 200, "per_device_train_batch_size": 2, "logging_steps": 100, "eval_steps": 100,
            "learning_rate": 1e-2, "debug_freq": 1000,
        },
    )  # fmt: skip
    ends = {}
    for name, settings in (("eager", EAGER), ("other-seed", (*EAGER, "train.seed=43")), ("fast", FAST)):
        assert run(config, *settings, run_id=name) == 0
        ends[name] = events(tmp_path / "runs" / name, "eval")[-1]["loss"]
    noise = abs(ends["other-seed"] - ends["eager"])
    began = events(tmp_path / "runs" / "eager", "step")[0]["loss"]
    assert 0 < noise < 0.05 and began - ends["eager"] > 0.8  # it has learnt, far more than noise
    assert abs(ends["fast"] - ends["eager"]) < noise / 10  # the same seed, and float32: hardly any of it
