"""Random models, tokenizers and datasets small enough to be made for each test."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

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


_SMALL: dict[str, object] = {
    "vocab_size": 72, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MLA: dict[str, object] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}  # fmt: skip
_EXPERTS: dict[str, object] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_DELTA_NETS: dict[str, object] = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_WINDOW: dict[str, object] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# What an architecture needs beyond that to stay small and to have each of its kinds of layer. `head_dim` does not
# always follow the hidden size.
_OF_TYPE: dict[str, dict[str, object]] = {
    "mistral4": {**_MLA, "first_k_dense_replace": 0},
    "deepseek_v3": {**_MLA, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "mixtral": {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "qwen3_next": {**_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": {**_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "glm4_moe": {
        "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": 8, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW},
    "llama4_text": {
        "head_dim": 8, "intermediate_size": 16, "intermediate_size_mlp": 32, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 6, "no_rope_layers": [1, 0],
    },
    "falcon_h1": {
        "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "gemma2": {"head_dim": 8, **_WINDOW},
    "gemma3_text": {"head_dim": 8, **_WINDOW},
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 72,
        "num_kv_shared_layers": 0, **_WINDOW,
    },
    "olmo3": _WINDOW, "cohere2": {"head_dim": 8, **_WINDOW}, "smollm3": {"no_rope_layers": [1, 0]},
    "gemma": {"head_dim": 8}, "glm": {"head_dim": 8}, "glm4": {"head_dim": 8}, "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8}, "ministral": {"head_dim": 8}, "ministral3": {"head_dim": 8},
}  # fmt: skip


def toy_text_config(model_type: str, **changes: object) -> Any:
    """The config of a random two-layer model of any architecture transformers knows."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**{**_SMALL, **_OF_TYPE.get(model_type, {}), **changes})


def mistral4_config(**changes: object) -> Any:
    """MLA attention; 4 routed experts (2 per token) and a shared one in both layers."""
    return toy_text_config("mistral4", **changes)


def mixtral_config(**changes: object) -> Any:
    """4 routed experts, 2 per token, no shared one."""
    return toy_text_config("mixtral", **changes)


def qwen3_moe_config(**changes: object) -> Any:
    """4 routed experts, 2 per token, no shared one. `mlp_only_layers=[0]` makes layer 0 dense."""
    return toy_text_config("qwen3_moe", **changes)


def wrapper_config(text_config: Any = None, **changes: object) -> Any:
    """Mistral3: a tiny vision tower beside a text model (a Mistral 4 unless another config is given)."""
    from transformers import Mistral3Config, PixtralVisionConfig

    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    values: dict[str, object] = {"tie_word_embeddings": False, "image_token_index": 10, **changes}
    return Mistral3Config(vision_config=vision, text_config=text_config or mistral4_config(), **values)


def save_toy(model_class: type, config: Any, folder: Path, seed: int = 0) -> Path:
    """A random model of the class, saved with the toy tokenizer, in float32."""
    import torch

    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
    toy_tokenizer(folder)
    return folder


def toy_llama(folder: Path, *, layers: int = 2, hidden: int = 32, seed: int = 0) -> Path:
    """A random two-layer Llama with its tokenizer, in float32."""
    from transformers import LlamaForCausalLM

    config = toy_text_config("llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=2 * hidden)
    return save_toy(LlamaForCausalLM, config, folder, seed)


def toy_chat_llama(folder: Path, *, seed: int = 0) -> Path:
    """The same with a byte-level tokenizer (any text of any language) and a ChatML template."""
    from chat_tokenizers import chat_tokenizer
    from transformers import LlamaForCausalLM

    tokenizer = chat_tokenizer("chatml")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = toy_text_config("llama", vocab_size=len(tokenizer), **special, pad_token_id=tokenizer.pad_token_id)
    save_toy(LlamaForCausalLM, config, folder, seed)
    tokenizer.save_pretrained(folder)
    return folder


def toy_mistral4(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    from transformers import Mistral4ForCausalLM

    return save_toy(Mistral4ForCausalLM, mistral4_config(**changes), folder, seed)


def toy_mixtral(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Stored as Mixtral is: one tensor per expert, which transformers fuses when it loads them."""
    from transformers import MixtralForCausalLM

    return save_toy(MixtralForCausalLM, mixtral_config(**changes), folder, seed)


def toy_qwen3_moe(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """Stored as Qwen3-MoE is: one tensor per expert, which transformers fuses when it loads them."""
    from transformers import Qwen3MoeForCausalLM

    return save_toy(Qwen3MoeForCausalLM, qwen3_moe_config(**changes), folder, seed)


def toy_wrapper(folder: Path, text_config: Any = None, *, seed: int = 0, **changes: object) -> Path:
    """A vision+text checkpoint whose text part is a Mistral 4, or what `text_config` says."""
    from transformers import Mistral3ForConditionalGeneration

    return save_toy(Mistral3ForConditionalGeneration, wrapper_config(text_config, **changes), folder, seed)


def big_llama(folder: Path, gigabytes: float) -> int:
    """A bf16 Llama of about that size in files of half a gigabyte; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(gigabytes * 1e9 / 2 / 43e6) - 4)  # a layer of this shape has 43M parameters
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=4352, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    # Drawing two billion normal numbers takes longer than everything measured here; slices of one draw do as well.
    pool = torch.randn(1 << 24).bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            flat = parameter.view(-1)
            for start in range(0, len(flat), len(pool)):
                part = flat[start : start + len(pool)]
                part.copy_(pool.roll(index * 97 + start // len(pool))[: len(part)])
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


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
        "parallel": {"device": "cpu", "shard": "full"},
    }  # fmt: skip
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def plain_eval_loss(model: Any, tokenizer: Any, data: Path) -> float:
    """Mean cross-entropy of the answers in the toy validation rows, a row at a time, by transformers alone."""
    import torch

    summed, tokens = 0.0, 0
    for row in map(json.loads, (data / "validation.jsonl").read_text().splitlines()):
        prompt = tokenizer(row["question"] + " =>")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        summed += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        tokens += len(answer)
    return summed / tokens
