"""Runs with new tokens: sharded as alone, through checkpoints, and into plain PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interrupted import evaluations, final_weights, lines, whole_cut_and_alone
from running import Command, events
from safetensors.torch import load_file
from toys import WORDS, save_toy, toy_config, toy_text_config, toy_wrapper

TOKENS = ["<|tool|>", "<|/tool|>", "<|never|>"]
EMBEDDING = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD = "base_model.model.lm_head.token_adapter.trainable_tokens_delta"


@pytest.fixture(scope="module")
def tool_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool-data")
    for name, rows in (("train", range(40)), ("validation", range(40, 49))):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in rows:
                words = [WORDS[(i * 7 + j * j) % 60] for j in range(2 + i % 4)]
                row = {"question": " ".join(words), "answer": f"<|tool|> {' '.join(reversed(words))} <|/tool|>"}
                file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def config(tool_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding has to grow, with a head of its own."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("new-tokens")
    untied = toy_text_config("llama", vocab_size=65, tie_word_embeddings=False)
    save_toy(LlamaForCausalLM, untied, folder / "model")
    return toy_config(
        folder, folder / "model", tool_data, model={"new_tokens": TOKENS}, data={"val_split": "validation"},
        train={"max_steps": 6, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(config: Path, shared_environment: dict[str, str]) -> Path:
    return whole_cut_and_alone(shared_environment, config)


@pytest.mark.slow
def test_two_processes_train_new_rows_as_one_does(runs: Path) -> None:
    for number in ("loss", "grad_norm"):
        alone, shared = ([event[number] for event in events(runs / name, "step")] for name in ("alone", "whole"))
        assert shared == pytest.approx(alone, rel=2e-5)
    alone, shared = (load_file(runs / name / "final" / "adapter_model.safetensors") for name in ("alone", "whole"))
    for name in (EMBEDDING, HEAD):
        assert shared[name].shape == (3, 32)
        assert (shared[name] - alone[name]).abs().max() < 1e-5


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(runs: Path) -> None:
    whole, cut = runs / "whole", runs / "cut"
    assert [event["step"] for event in events(cut, "resume")] == [4]
    assert lines(cut) == lines(whole) and evaluations(cut) == evaluations(whole)
    assert final_weights(cut) == final_weights(whole)


@pytest.mark.slow
def test_a_token_without_a_row_is_warned_of_and_new_ones_are_proven_and_start_at_the_mean(
    runs: Path, config: Path
) -> None:
    (warned,) = [event["text"] for event in events(runs / "alone", "warning") if "new_tokens" in event["text"]]
    assert "<|never|> is in no training row" in warned
    (proof,) = events(runs / "alone", "proof")
    adapter = load_file(runs / "alone" / "final" / "adapter_model.safetensors")
    assert proof["proven"] == proof["shards"] == len(adapter)
    # AdamW moves a row it has no gradient for by weight decay alone, which is next to nothing here.
    stored = load_file(config.parent / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert adapter[EMBEDDING][2].numpy() == pytest.approx(stored.mean(dim=0).numpy(), rel=2e-3, abs=1e-6)


@pytest.mark.slow
def test_the_adapter_of_a_wrapped_model_brings_its_tokens_to_the_wrapper(
    shardtune: Command, tool_data: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import Mistral3ForConditionalGeneration

    toy_wrapper(tmp_path / "model")
    done = shardtune(
        "train", toy_config(tmp_path, tmp_path / "model", tool_data, model={"new_tokens": TOKENS},
                            lora={"target_modules": ["attention"]})
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    adapter = load_file(run / "final" / "adapter_model.safetensors")
    served = PeftModel.from_pretrained(
        Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32),
        run / "final" / "on-wrapper",
    )
    rows = served.get_base_model().model.language_model.embed_tokens.token_adapter.trainable_tokens_delta["default"]
    assert torch.equal(rows, adapter[EMBEDDING])
