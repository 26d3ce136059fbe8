"""Architectures that are unlike the others train from start to end, and plain PEFT scores what the run said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from interrupted import run
from journeys.reference import load, pair_example, score
from running import events
from toys import save_toy, toy_config, toy_text_config

from shardtune.config import load_config
from shardtune.model.families.registry import family_for

# By kind: what `auto` settles for packing and attention.
SETTLED = {
    "llama4_text": (False, "sdpa"),
    "gpt_oss": (False, "eager"),
    "gemma2": (True, "eager"),
    "falcon_h1": (False, "sdpa"),
    "lfm2": (False, "sdpa"),
    "qwen3_next": (False, "sdpa"),
    "starcoder2": (False, "sdpa"),  # no family file
}
FAST = ("llama4_text",)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST)) for k in SETTLED])
def test_a_run_scores_what_plain_transformers_and_peft_score(
    kind: str, toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = family_for(kind)
    name = family.causal_lm[kind] if family else "Starcoder2ForCausalLM"
    # With transformers' spread of 0.02 the layers of a toy hardly do anything.
    config = toy_text_config(kind, initializer_range=0.2)
    model = save_toy(getattr(transformers, name), config, tmp_path / "model")
    file = toy_config(
        tmp_path, model, toy_data, lora={"target_modules": "all-linear"}, data={"val_split": "validation"},
        train={"max_steps": 2, "per_device_eval_batch_size": 4},
    )  # fmt: skip
    assert run(file, run_id="one") == 0
    packed, attention = SETTLED[kind]
    settled = load_config(tmp_path / "runs" / "one" / "config.yaml").config
    assert (settled.train.packing, settled.model.attn_implementation) == (packed, attention)
    assert ("packing   off (" in capsys.readouterr().out) is not packed
    notices = [event["text"] for event in events(tmp_path / "runs" / "one", "notice")]
    assert any(f"{kind} has no family file" in notice for notice in notices) is (family is None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in (toy_data / "validation.jsonl").read_text().splitlines()]
    examples = [pair_example(tokenizer, f"{row['question']} => ", row["answer"]) for row in rows]
    plain = score(load(model, tmp_path / "runs" / "one" / "final"), examples)
    base = score(load(model), examples)
    assert events(tmp_path / "runs" / "one", "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=5e-5)
    assert abs(base.loss - plain.loss) > 1e-3  # it learned something
    if kind == "llama4_text":  # whose causal model is its own `base_model`, which TRL's loss goes through
        assert run(file, "train.kernels=eager", run_id="eager") == 0
        assert any("computes no auxiliary loss for its routers" in notice for notice in notices)
        fused, eager = (events(tmp_path / "runs" / name, "eval")[-1]["loss"] for name in ("one", "eager"))
        assert eager == pytest.approx(fused, abs=5e-5)
