"""New tokens for a tool's calls: trained, loaded by plain PEFT, and measured again without a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Journey, read_events
from reference import load, pair_example, score
from toys import WORDS, save_toy, toy_text_config

TOKENS = ["<|tool|>", "<|/tool|>"]


def rows(numbers: range) -> list[dict[str, str]]:
    words = [[WORDS[(i * 7 + j * j) % 60] for j in range(2 + i % 4)] for i in numbers]
    return [{"prompt": " ".join(w) + " ", "completion": f"<|tool|> {' '.join(reversed(w))} <|/tool|>"} for w in words]


@pytest.mark.slow
def test_new_tokens_train_and_load_in_plain_peft_and_eval_loss_measures_what_the_run_said(journey: Journey) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    # 65 rows are what its tokenizer has: the embedding must grow. The head is the embedding.
    model = save_toy(LlamaForCausalLM, toy_text_config("llama", vocab_size=65, tie_word_embeddings=True),
                     journey.folder / "model")  # fmt: skip
    for name, part in (("train", rows(range(40))), ("validation", rows(range(40, 49)))):
        path = journey.folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    journey.write_config(
        model={"model_name_or_path": "model", "torch_dtype": "float32", "new_tokens": TOKENS},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data", "val_split": "validation", "max_length": 64,
              "format": "prompt-completion"},
        train={"max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 4},
    )  # fmt: skip
    journey.shardtune("train", "run.yaml")
    run = journey.only_run()
    said = read_events(run, "eval")[-1]["loss"]

    # docs/targets.md: the tokenizer is the adapter's, and a model without rows for its tokens is given them.
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    if len(tokenizer) > base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(len(tokenizer))
    examples = [pair_example(tokenizer, row["prompt"], row["completion"]) for row in rows(range(40, 49))]
    assert all(tokenizer.convert_tokens_to_ids(token) in example.ids for token in TOKENS for example in examples)
    plain = score(PeftModel.from_pretrained(base, run / "final").eval(), examples)
    assert said == pytest.approx(plain.loss, abs=2e-5)

    measured = journey.shardtune("eval-loss", "run.yaml", "--adapter", run, "--json", "--nproc", 2)
    found = json.loads(measured.stdout)
    assert found["eval_loss"] == pytest.approx(plain.loss, abs=2e-5)
    assert (found["supervised_tokens"], found["rows"], found["tokens"]) == (plain.supervised, 9, plain.tokens)
    assert journey.runs() == [run]


@pytest.mark.slow
def test_eval_loss_of_the_model_itself_is_that_of_plain_transformers(
    journey: Journey, toy_model: Path, toy_data: Path
) -> None:
    from transformers import AutoTokenizer

    journey.write_config(
        model={"model_name_or_path": str(toy_model), "torch_dtype": "float32"},
        data={"dataset_name_or_path": str(toy_data), "val_split": "validation", "prompt_template": "{question} {answer}"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    lines = map(json.loads, (toy_data / "validation.jsonl").read_text().splitlines())
    plain = score(load(toy_model), [pair_example(tokenizer, row["question"] + " ", row["answer"]) for row in lines])
    for nproc in (1, 2):
        found = json.loads(journey.shardtune("eval-loss", "run.yaml", "--json", "--nproc", nproc).stdout)
        assert found["eval_loss"] == pytest.approx(plain.loss, abs=2e-5)
        assert found["adapter"] is None and found["supervised_tokens"] == plain.supervised
    told = journey.shardtune("eval-loss", "run.yaml").stdout
    assert f"{plain.loss:.4f}, perplexity" in told and "folder" not in told
    assert not (journey.folder / "runs").exists()
