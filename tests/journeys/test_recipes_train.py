"""Every recipe in configs/ trains: two steps, with nothing changed but the model, the data and sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from chat_tokenizers import chat_tokenizer
from conversations import conversations
from fp8_toys import to_fp8
from running import REPOSITORY, Command, events
from toys import mistral4_config, toy_chat_llama, toy_wrapper

pytestmark = pytest.mark.slow
TEXTS = [
    f"The pump of line {row} runs at {40 + row} litres a minute, and stops when its valve is shut." for row in range(40)
]


def rows(folder: Path, make: Callable[[int], object]) -> Path:
    folder.mkdir()
    for name, numbers in (("train", range(32)), ("validation", range(32, 40))):
        text = "".join(json.dumps(make(row)) + "\n" for row in numbers)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def quickstart_data(folder: Path) -> Path:
    return rows(folder, lambda row: {"sentence": f"wake me at {row}", "json": f'{{"at": {row}}}'})


def instructions(folder: Path) -> Path:
    return rows(folder, lambda row: {"instruction": f"How fast is pump {row}?", "response": TEXTS[row]})


def chat(folder: Path) -> Path:
    file = folder.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations(40)), encoding="utf-8")
    return file


def corpus(folder: Path) -> Path:
    file = folder.with_suffix(".txt")
    file.write_text("\n\n".join(TEXTS), encoding="utf-8")
    return file


def mistral(folder: Path) -> Path:
    """Released as Mistral Small 4 is: the text model in a wrapper, its layers in FP8, with a chat template."""
    tokenizer = chat_tokenizer("mistral")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    toy_wrapper(folder, mistral4_config(vocab_size=len(tokenizer), max_position_embeddings=4096, **special))
    tokenizer.save_pretrained(folder)
    to_fp8(folder, "scalar")
    return folder


@dataclass(frozen=True)
class Case:
    """`overrides`: what the recipe is not about: float8 products need a GPU, and a toy fits without FP8 codes."""

    model: Callable[[Path], Path]
    data: Callable[[Path], Path]
    processes: int = 1
    overrides: Sequence[str] = ()


SIZES = ("data.val_split=0.2",)  # of 40 rows
CASES = {
    "smollm2-quickstart": Case(toy_chat_llama, quickstart_data),
    "dense-8b-one-gpu": Case(toy_chat_llama, instructions),
    "instruction-chat": Case(toy_chat_llama, chat),
    "domain-corpus": Case(toy_chat_llama, corpus, overrides=SIZES),
    "mistral-small-4": Case(mistral, chat, 3, ("model.base_precision=fp8", *SIZES)),
    "mistral-small-4-one-h200": Case(mistral, chat, overrides=("train.fp8_compute=false", *SIZES)),
    "two-nodes-on-a-cluster": Case(toy_chat_llama, instructions, 2),
}


def test_every_recipe_is_trained() -> None:
    assert {path.stem for path in (REPOSITORY / "configs").iterdir()} == set(CASES)


@pytest.mark.parametrize("recipe", CASES)
def test_it_trains_two_steps_evaluates_saves_and_publishes_the_best(
    shardtune: Command, tmp_path: Path, recipe: str
) -> None:
    case = CASES[recipe]
    sizes = {
        "model.model_name_or_path": case.model(tmp_path / "model"),
        "data.dataset_name_or_path": case.data(tmp_path / "data"),
        "data.max_length": 256,
        "train.output_dir": tmp_path / "runs",
        "train.effective_batch_size": 6,
        "train.max_steps": 2,
        "train.eval_steps": 1,
        "train.save_steps": 1,
        "lora.r": 4,
        "lora.lora_alpha": 8,
    }
    overrides = [f"{path}={value}" for path, value in sizes.items()] + list(case.overrides)
    config = REPOSITORY / "configs" / f"{recipe}.yaml"
    arguments = [part for override in overrides for part in ("-o", override)]
    result = shardtune("train", config, "--nproc", case.processes, "--run-id", "run", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "run"
    assert [event["step"] for event in events(run, "eval")] == [1, 2]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000001", "step-000002"]
    assert (run / "final" / "adapter_model.safetensors").is_file()
    assert (run / "final" / "on-wrapper").is_dir() == recipe.startswith("mistral")
    assert events(run, "run_start")[0]["world_size"] == case.processes
