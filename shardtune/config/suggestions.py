"""Which key was meant? Misspelt keys, keys in the wrong section, and the names other tools use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from shardtune.config.fields import Section
from shardtune.config.refused import refusal
from shardtune.config.schema import RunConfig

# Names from TRL, transformers, axolotl, LLaMA-Factory, torchtune and accelerate for what is set here elsewhere.
FOREIGN_KEYS: dict[str, str] = {
    "base_model": "model.model_name_or_path", "model_name": "model.model_name_or_path",
    "model_id": "model.model_name_or_path", "model_path": "model.model_name_or_path",
    "pretrained_model_name_or_path": "model.model_name_or_path", "name_or_path": "model.model_name_or_path",
    "path": "model.model_name_or_path", "name": "model.model_name_or_path", "model_revision": "model.revision",
    "tokenizer": "model.tokenizer_name_or_path", "tokenizer_name": "model.tokenizer_name_or_path",
    "dtype": "model.torch_dtype", "precision": "model.torch_dtype", "flash_attention": "model.attn_implementation",
    "flash_attn": "model.attn_implementation", "attn_impl": "model.attn_implementation",
    "lora_r": "lora.r", "lora_rank": "lora.r", "rank": "lora.r", "alpha": "lora.lora_alpha",
    "dropout": "lora.lora_dropout", "lora_target": "lora.target_modules", "lora_target_modules": "lora.target_modules",
    "expert_rank": "lora.expert_r", "lora_expert_r": "lora.expert_r",
    "train_experts": "lora.experts", "rslora": "lora.use_rslora",
    "dataset": "data.dataset_name_or_path", "datasets": "data.dataset_name_or_path",
    "dataset_name": "data.dataset_name_or_path", "dataset_path": "data.dataset_name_or_path",
    "data_path": "data.dataset_name_or_path", "train_file": "data.dataset_name_or_path",
    "dataset_config": "data.dataset_config_name",
    "text_column": "data.text_field", "max_seq_length": "data.max_length", "max_seq_len": "data.max_length",
    "seq_length": "data.max_length", "sequence_len": "data.max_length", "cutoff_len": "data.max_length",
    "block_size": "data.max_length", "model_max_length": "data.max_length", "split": "data.train_split",
    "dataset_train_split": "data.train_split", "dataset_test_split": "data.val_split", "eval_split": "data.val_split",
    "validation_split": "data.val_split", "test_split": "data.val_split", "template": "data.prompt_template",
    "prompt": "data.prompt_template", "train_on_inputs": "data.train_on",
    "train_on_prompt": "data.train_on",
    "epochs": "train.num_train_epochs", "num_epochs": "train.num_train_epochs", "max_train_steps": "train.max_steps",
    "steps": "train.max_steps", "lr": "train.learning_rate", "batch_size": "train.per_device_train_batch_size",
    "train_batch_size": "train.per_device_train_batch_size", "micro_batch_size": "train.per_device_train_batch_size",
    "per_gpu_train_batch_size": "train.per_device_train_batch_size",
    "per_device_batch_size": "train.per_device_train_batch_size",
    "per_device_batch": "train.per_device_train_batch_size",
    "eval_batch_size": "train.per_device_eval_batch_size", "val_batch_size": "train.per_device_eval_batch_size",
    "accumulation_steps": "train.gradient_accumulation_steps", "grad_accum": "train.gradient_accumulation_steps",
    "grad_accum_steps": "train.gradient_accumulation_steps", "optimizer": "train.optim",
    "scheduler": "train.lr_scheduler_type", "lr_scheduler": "train.lr_scheduler_type", "warmup": "train.warmup_steps",
    "grad_clip": "train.max_grad_norm", "gradient_clipping": "train.max_grad_norm",
    "gradient_clip_val": "train.max_grad_norm", "evaluation_strategy": "train.eval_strategy",
    "sample_packing": "train.packing", "log_every_n_steps": "train.logging_steps",
    "activation_checkpointing": "train.gradient_checkpointing",
    "random_seed": "train.seed", "neftune_alpha": "train.neftune_noise_alpha",
    "num_workers": "train.dataloader_num_workers", "beta1": "train.adam_beta1", "beta2": "train.adam_beta2",
    "label_smoothing": "train.label_smoothing_factor", "min_lr_ratio": "train.lr_scheduler_kwargs",
    "early_stopping": "train.early_stopping_patience",
    "use_wandb": "train.report_to",
    "num_processes": "parallel.nproc", "nproc_per_node": "parallel.nproc", "num_gpus": "parallel.nproc",
    "no_cuda": "parallel.device", "cpu_offload": "parallel.offload_params",
    "fsdp_offload_params": "parallel.offload_params",
    "fsdp_transformer_layer_cls_to_wrap": "parallel.transformer_layer_cls_to_wrap",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "num_nodes": "cluster.nodes", "nnodes": "cluster.nodes", "num_machines": "cluster.nodes",
}  # fmt: skip

_FOREIGN_SECTIONS = {
    "training": "train", "trainer": "train", "training_args": "train", "training_arguments": "train", "sft": "train",
    "peft": "lora", "adapter": "lora", "qlora": "lora", "peft_config": "lora", "lora_config": "lora",
    "dataset": "data", "datasets": "data", "fsdp": "parallel", "fsdp_config": "parallel", "distributed": "parallel",
    "sharding": "parallel", "kubernetes": "cluster", "k8s": "cluster", "runai": "cluster",
    "model_config": "model", "model_args": "model",
}  # fmt: skip

FOREIGN_VALUES: dict[str, str] = {
    "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "fp32": "float32", "torch.float32": "float32",
    "gpu": "cuda", "flash_attn": "flash_attention_2", "flash": "flash_attention_2", "causal_lm": "CAUSAL_LM",
    "epochs": "epoch", "step": "steps", "never": "no", "answer": "completion",
}  # fmt: skip


def section_fields() -> dict[str, type[Section]]:
    """The sections of a config by name."""
    found = {}
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        found[name] = field.annotation
    return found


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known word closest to this one in spelling, if any is close enough to be a slip."""
    return next(iter(close_words(word, known, cutoff)), None)


def close_words(word: str, known: Iterable[str], cutoff: float = 0.7) -> list[str]:
    """The known words that are spelled most like this one, up to three, the closest first."""
    by_lower = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=3, cutoff=cutoff)
    return [by_lower[name] for name in close]


def unknown_key(key: str, value: Any, section: str = "") -> tuple[str, str]:
    """What is wrong with a key that no setting has, and what to do.

    Args:
        value: What it is set to, as plain Python.
        section: Where it stands; "" for the top of the file.
    """
    if not section and isinstance(value, dict) and key in _FOREIGN_SECTIONS:
        return "unknown key", f"did you mean the section `{_FOREIGN_SECTIONS[key]}`?"
    if why := refusal(key, value):
        return f"not a setting here: {why}", ""
    return "unknown key", _meant_in_section(key, section) if section else _meant_at_the_top(key)


def moved_settings(extra: Any) -> str:
    """Where the entries of `train.extra` go, which older versions passed on to TRL."""
    entries = extra if isinstance(extra, dict) else {}
    moved = [f"`{_owners(key)[0]}.{key}`" for key in entries if _owners(key)]
    refused = [
        f"`{key}` is not a setting here ({refusal(key, value) or _meant_in_section(key, 'train')})"
        for key, value in entries.items()
        if not _owners(key)
    ]
    parts = [f"write {', '.join(moved)}"] if moved else []
    return "`train.extra` is gone: " + ("; ".join([*parts, *refused]) or "remove it")


def _meant_at_the_top(key: str) -> str:
    sections = section_fields()
    owners = _owners(key)
    if owners:
        return f"`{key}` belongs in {_or(f'`{owner}`' for owner in owners)}"
    if key in FOREIGN_KEYS:
        return f"did you mean `{FOREIGN_KEYS[key]}`?"
    close = nearest(key, sections)
    if close:
        return f"did you mean the section `{close}`?"
    return _nearest_anywhere(key) or f"the sections are: {', '.join(sections)}"


def _meant_in_section(key: str, section: str) -> str:
    fields = section_fields()[section].model_fields
    if key == "extends":
        return "`extends` goes at the top of the file"
    owners = _owners(key)
    if owners:
        return f"`{key}` belongs in {_or(f'`{owner}`' for owner in owners)}"
    meant = FOREIGN_KEYS.get(key)
    if meant is not None and key not in ("path", "name"):
        owner, _, name = meant.partition(".")
        return f"did you mean `{name if owner == section else meant}`?"
    close = nearest(key, fields)
    if close:
        return f"did you mean `{close}`?"
    if key in section_fields():
        return f"`{key}` is a section of its own; check the indentation"
    if len(fields) > 10:
        return _nearest_anywhere(key) or "`shardtune config reference` lists all settings"
    return _nearest_anywhere(key) or f"the keys of `{section}` are {', '.join(fields)}"


def _owners(key: str) -> list[str]:
    return [name for name, section in section_fields().items() if key in section.model_fields]


def _nearest_anywhere(key: str) -> str:
    paths = {field: name for name, section in section_fields().items() for field in section.model_fields}
    close = nearest(key, paths, cutoff=0.8)
    return f"did you mean `{paths[close]}.{close}`?" if close else ""


def _or(words: Iterable[str]) -> str:
    return " or ".join(words)
