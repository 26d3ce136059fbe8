"""The loss of each row is that of plain transformers and PEFT, and their sum is what training's evaluation reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toys import plain_eval_loss, save_toy, toy_text_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.data.prepared import Prepared
from shardtune.data.tokens import IGNORED
from shardtune.evaluation.likelihood import row_losses
from shardtune.evaluation.metrics import perplexity
from shardtune.evaluation.rows import DataChoice, read_rows
from shardtune.inference.load import load_tuned
from shardtune.inference.source import find_tuned


def plain_losses(model: torch.nn.Module, prepared: Prepared) -> list[float]:
    found = []
    for number in range(len(prepared)):
        ids, labels = (torch.from_numpy(array).long() for array in prepared.row(number))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
        found.append(
            torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum").item()
        )
    return found


def test_each_row_has_the_loss_of_plain_transformers_and_peft(toy_run: Path) -> None:
    tuned = find_tuned(str(toy_run))
    loaded = load_tuned(tuned, torch.device("cpu"))
    rows = read_rows(tuned, DataChoice(), loaded.tokenizer)
    base = AutoModelForCausalLM.from_pretrained(tuned.base.model_name_or_path, dtype=torch.float32)
    wanted = {"base": plain_losses(base.eval(), rows.prepared)}
    peft = PeftModel.from_pretrained(base, toy_run / "final").eval()
    wanted["tuned"] = plain_losses(peft, rows.prepared)
    assert np.abs(np.subtract(wanted["tuned"], wanted["base"])).max() > 0.1
    tokens = rows.prepared.supervised.astype(np.int64)
    seen: list[int] = []
    for side in ("base", "tuned"):
        for batch_tokens in (1, 64, 4096):
            with loaded.side(tuned=side == "tuned") as model:
                found = row_losses(
                    model, rows.prepared, rows.chosen, 0, vocabulary=72, batch_tokens=batch_tokens, done=seen.append
                )
            np.testing.assert_allclose(found, wanted[side], rtol=2e-5)
        mean = perplexity({"tuned": found}, tokens)[0].sides["tuned"].value
        data, model = toy_run.parents[1] / "data", base.eval() if side == "base" else peft
        if side == "tuned":  # PEFT has put its adapters into `base`
            assert mean == pytest.approx(
                plain_eval_loss(model, AutoTokenizer.from_pretrained(toy_run.parents[1] / "model"), data), rel=1e-5
            )
    assert seen[-1] == len(rows.chosen)


@pytest.mark.parametrize("kind", ["gemma2", "cohere2"])  # logits that are capped; logits that are scaled
def test_what_comes_behind_the_head_is_kept(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(toy_text_config(kind)).float()
    model = get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()

    class Rows:
        lengths = np.array([5, 9])

        def __len__(self) -> int:
            return 2

        def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            ids = np.arange(20, 20 + self.lengths[number], dtype=np.int32)
            return ids, np.where(np.arange(len(ids)) < 2, IGNORED, ids).astype(np.int32)

    rows: Prepared = Rows()  # type: ignore[assignment]
    found = row_losses(model, rows, [1, 0], 0, vocabulary=72, batch_tokens=64, done=lambda done: None)
    np.testing.assert_allclose(found[::-1], plain_losses(model, rows), rtol=2e-5)


def test_tokens_that_the_base_lacks_take_no_probability_from_those_it_has(tmp_path: Path) -> None:
    """New tokens have rows in the embedding, which are zero without the adapter."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    save_toy(LlamaForCausalLM, toy_text_config("llama", vocab_size=66), tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    larger = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    larger.resize_token_embeddings(72, mean_resizing=False)
    adapter = get_peft_model(
        larger,
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            task_type="CAUSAL_LM",
            trainable_token_indices={"embed_tokens": [68], "lm_head": [68]},
        ),
    )
    adapter.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_tokens([f"<new{index}>" for index in range(69 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(tmp_path / "base")}))
    loaded = load_tuned(find_tuned(str(tmp_path / "adapter")), torch.device("cpu"))
    assert loaded.stored_rows == 66

    class Row:
        lengths = np.array([6])

        def __len__(self) -> int:
            return 1

        def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            ids = np.array([10, 20, 30, 40, 50, 2], np.int32)
            return ids, ids

    rows: Prepared = Row()  # type: ignore[assignment]
    with loaded.side(tuned=False) as model:
        found = row_losses(model, rows, [0], 0, vocabulary=loaded.stored_rows, batch_tokens=64, done=lambda done: None)
    np.testing.assert_allclose(found, plain_losses(base, rows), rtol=2e-3)
