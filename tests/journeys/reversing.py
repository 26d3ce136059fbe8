"""A task for toys: the answer is the question's words in reverse. Its files, its config, and what a run of it must say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from journey import Journey, read_events
from reference import Example, Score, load, pair_example, score

_WORDS = [f"w{i:02d}" for i in range(60)]  # the toys' vocabulary
_PROMPT, _ANSWER = "{question} =>", " {answer}"


def write_rows(journey: Journey, train: int = 40, validation: int = 9) -> None:
    draw = random.Random(3)
    (journey.folder / "data").mkdir()
    for name, count in (("train", train), ("validation", validation)):
        rows = [draw.choices(_WORDS, k=draw.randint(2, 9)) for _ in range(count)]
        lines = [{"question": " ".join(words), "answer": " ".join(reversed(words))} for words in rows]
        path = journey.folder / "data" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(journey: Journey, model: Path, /, **sections: dict[str, Any]) -> Path:
    """run.yaml, twelve steps of eight rows on one process; `sections` are merged over it."""
    values: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": str(model), "torch_dtype": "float32"},
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"},
        "data": {
            "dataset_name_or_path": "data", "val_split": "validation", "prompt_template": _PROMPT + _ANSWER, "max_length": 64,
        },
        "train": {"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 1},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return journey.write_config(**values)


def validation_rows(journey: Journey, tokenizer: Any) -> list[Example]:
    lines = (journey.folder / "data" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [pair_example(tokenizer, _PROMPT.format(**row), _ANSWER.format(**row)) for row in rows]


def check_run(journey: Journey, run: Path, model: Path, base: Any = None) -> Score:
    """The evaluation that `run` wrote down is what plain PEFT finds with the adapter it left; so are its token counts.

    Args:
        base: The plain model, where `from_pretrained` on the folder does not give it.
    """
    from peft import PeftModel
    from transformers import AutoTokenizer

    rows = validation_rows(journey, AutoTokenizer.from_pretrained(model))
    adapted = (
        load(model, run / "final") if base is None else PeftModel.from_pretrained(base.eval(), run / "final").eval()
    )
    plain, said = score(adapted, rows), read_events(run, "eval")[-1]
    assert said["loss"] == pytest.approx(plain.loss, abs=3e-5)
    counted = next(event for event in read_events(run, "data"))["validation"]
    assert (counted["tokens"], counted["supervised"]) == (plain.tokens, plain.supervised)
    with adapted.disable_adapter():
        assert abs(score(adapted, rows).loss - plain.loss) > 0.01  # the adapter does something
    return plain
