"""Random models, tokenizers and datasets small enough to be made for each test."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [f"w{i:02d}" for i in range(60)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def toy_tokenizer(folder: Path) -> None:
    """A word-level tokenizer: one token per word, `</s>` at the end is left to the data pipeline."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, "=>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def toy_llama(folder: Path, *, layers: int = 2, hidden: int = 32, seed: int = 0) -> Path:
    """A random two-layer Llama with its tokenizer, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=72, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    toy_tokenizer(folder)
    return folder


def toy_rows(folder: Path, *, rows: int = 50, val_rows: int = 13, seed: int = 0) -> Path:
    """Rows of different lengths with a rule to learn: the answer is the question's words in reverse."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", rows), ("validation", val_rows)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                words = rng.choices(WORDS, k=rng.randint(2, 9))
                row = {"question": " ".join(words), "answer": " ".join(reversed(words))}
                row["text"] = f"{row['question']} => {row['answer']}"
                file.write(json.dumps(row) + "\n")
    return folder


def toy_config(folder: Path, model_folder: Path, data_folder: Path, **sections: dict[str, object]) -> Path:
    """A config file for a run of a few seconds; `sections` are merged over it."""
    import yaml

    values: dict[str, dict[str, object]] = {
        "model": {"model_name_or_path": str(model_folder), "torch_dtype": "float32"},
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        "data": {"dataset_name_or_path": str(data_folder), "prompt_template": "{question} => {answer}", "max_length": 64},
        "train": {
            "output_dir": str(folder / "runs"), "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1,
            "learning_rate": 1e-2, "save_strategy": "no", "warmup_ratio": 0.0,
        },
        "parallel": {"device": "cpu"},
    }  # fmt: skip
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path
