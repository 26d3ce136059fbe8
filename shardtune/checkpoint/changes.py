"""Which settings may change when a run resumes? A verdict for every setting, in one table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.redact import redacted_settings, redacted_values

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """free: changes no result. notice: allowed, with a message about its effect. refused: it would be another run.

    batch: free as long as per-device × processes × accumulation stays the same, which is checked on its own.
    """

    kind: Literal["free", "notice", "refused", "batch"]
    meaning: str = ""


_FREE, _BATCH = Verdict("free"), Verdict("batch")
_DATA = Verdict("refused", "the rows or their order change, so the position in the data is no longer valid")
_MODEL = Verdict("refused", "the adapter was trained on another model")
_SHAPE = Verdict("refused", "the adapter's tensors or their scaling would change")
_ROUNDING = Verdict("notice", "same computation, different rounding: losses continue slightly differently")
_RATE = Verdict("notice", "from here on the learning rate follows the new schedule")
_LENGTH = Verdict("notice", "the schedule is rescaled to the new length, so the learning rate jumps here")
_OPTIMIZER = Verdict("notice", "the optimizer uses the new value from here on")
_STOPPING = Verdict("notice", "early stopping uses the new value from here on")
_OBJECTIVE = Verdict("notice", "training minimizes the new objective from here on")
_GUARD = Verdict("notice", "guards use the new value from here on")

VERDICTS: dict[str, Verdict] = {
    "model.model_name_or_path": _MODEL,
    "model.revision": _MODEL,
    "model.tokenizer_name_or_path": _DATA,
    "model.new_tokens": _DATA,
    "model.torch_dtype": _ROUNDING,
    "model.base_precision": Verdict(
        "notice", "the frozen weights are stored differently: the same values for an FP8 checkpoint, rounded for others"
    ),
    "model.weights": _MODEL,
    "model.load": _FREE,
    "model.ignore_tensors": _MODEL,
    "model.device_map": _FREE,
    "model.use_cache": _FREE,
    "model.attn_implementation": _ROUNDING,
    "model.trust_remote_code": _FREE,
    "lora.r": _SHAPE,
    "lora.lora_alpha": _SHAPE,
    "lora.lora_dropout": Verdict("notice", "different dropout on the adapters' input from here on"),
    "lora.target_modules": _SHAPE,
    "lora.exclude_modules": _SHAPE,
    "lora.layers_to_transform": _SHAPE,
    "lora.rank_pattern": _SHAPE,
    "lora.alpha_pattern": _SHAPE,
    "lora.experts": _SHAPE,
    "lora.expert_r": _SHAPE,
    "lora.expert_alpha": _SHAPE,
    "lora.modules_to_save": _SHAPE,
    "lora.bias": _SHAPE,
    "lora.task_type": _SHAPE,
    "lora.use_dora": _SHAPE,
    "lora.init_lora_weights": _SHAPE,
    "lora.use_rslora": _SHAPE,
    "data.dataset_name_or_path": _DATA,
    "data.dataset_config_name": _DATA,
    "data.format": _DATA,
    "data.text_field": _DATA,
    "data.messages_field": _DATA,
    "data.prompt_template": _DATA,
    "data.chat_template": _DATA,
    "data.train_on": _DATA,
    "data.train_split": _DATA,
    "data.val_split": _DATA,
    "data.max_length": _DATA,
    "data.long_rows": _DATA,
    "data.concatenate": _DATA,
    "data.append_eos": _DATA,
    "data.on_error": _DATA,
    "data.cache_dir": _FREE,
    "train.output_dir": _FREE,
    "train.run_folder_access": _FREE,
    "train.num_train_epochs": _LENGTH,
    "train.max_steps": _LENGTH,
    "train.effective_batch_size": _BATCH,
    "train.per_device_train_batch_size": _BATCH,
    "train.per_device_eval_batch_size": _FREE,
    "train.gradient_accumulation_steps": _BATCH,
    "train.gradient_checkpointing": _FREE,
    "train.offload_activations": _FREE,
    "train.optim": Verdict("refused", "the saved state belongs to another optimizer"),
    "train.learning_rate": _RATE,
    "train.optim_args": Verdict("refused", "the saved state belongs to other arguments of the optimizer"),
    "train.adam_beta1": _OPTIMIZER,
    "train.adam_beta2": _OPTIMIZER,
    "train.adam_epsilon": _OPTIMIZER,
    "train.lr_scheduler_type": _RATE,
    "train.lr_scheduler_kwargs": _RATE,
    "train.warmup_ratio": _RATE,
    "train.warmup_steps": _RATE,
    "train.weight_decay": Verdict("notice", "the new weight decay applies from here on"),
    "train.max_grad_norm": Verdict("notice", "gradients are clipped at the new norm from here on"),
    "train.loss": _OBJECTIVE,
    "train.label_smoothing_factor": _OBJECTIVE,
    "train.router_aux_loss_coef": _OBJECTIVE,
    "train.neftune_noise_alpha": _OBJECTIVE,
    "train.bf16": _ROUNDING,
    "train.fp16": _FREE,
    "train.kernels": _ROUNDING,
    "train.fused_lora": _ROUNDING,
    "train.fused_experts": _ROUNDING,
    "train.fused_loss": _ROUNDING,
    "train.fp8_compute": _ROUNDING,
    "train.compile": _ROUNDING,
    "train.packing": _DATA,
    "train.logging_steps": _FREE,
    "train.dataloader_num_workers": _FREE,
    "train.dataloader_prefetch_factor": _FREE,
    "train.dataloader_persistent_workers": _FREE,
    "train.dataloader_pin_memory": _FREE,
    "train.logging_strategy": _FREE,
    "train.logging_first_step": _FREE,
    "train.eval_strategy": _FREE,
    "train.eval_delay": _FREE,
    "train.eval_on_start": _FREE,
    "train.early_stopping_patience": _STOPPING,
    "train.early_stopping_threshold": _STOPPING,
    "train.eval_steps": _FREE,
    "train.save_strategy": _FREE,
    "train.save_steps": _FREE,
    "train.save_minutes": _FREE,
    "train.save_total_limit": _FREE,
    "train.load_best_model_at_end": _FREE,
    "train.resume": _FREE,
    "train.report_to": _FREE,
    "train.run_name": _FREE,
    "train.project": _FREE,
    "train.trackio_space_id": _FREE,
    "train.trackio_bucket_id": _FREE,
    "train.trackio_static_space_id": _FREE,
    "train.callbacks": _FREE,
    "train.seed": _DATA,
    "train.data_seed": _DATA,
    "train.full_determinism": _ROUNDING,
    "train.tf32": _ROUNDING,
    "train.torch_empty_cache_steps": _FREE,
    "train.ddp_find_unused_parameters": _FREE,
    "train.debug_freq": _FREE,
    "train.samples": _FREE,
    "train.sample_tokens": _FREE,
    "parallel.nproc": _BATCH,
    "parallel.device": _ROUNDING,
    "parallel.accelerate_config": _FREE,
    "parallel.transformer_layer_cls_to_wrap": _FREE,
    "parallel.shard": _ROUNDING,
    "parallel.shard_size": _ROUNDING,
    "parallel.reshard_after_forward": _FREE,
    "parallel.forward_prefetch": _FREE,
    "parallel.backward_prefetch": _FREE,
    "parallel.offload_params": _FREE,
    "parallel.reduce_dtype": _ROUNDING,
    "parallel.load_timeout_minutes": _FREE,
    "parallel.step_timeout_minutes": _FREE,
    "parallel.checkpoint_timeout_minutes": _FREE,
    "parallel.join_timeout_minutes": _FREE,
    "parallel.node_timeout_seconds": _FREE,
    "parallel.max_restarts": _FREE,
    "train.final_wait_minutes": _FREE,
    "train.fallback_dir": _FREE,
    "train.grace_seconds": _FREE,
    "guards.memory_plan": _FREE,
    "guards.non_finite": _GUARD,
    "guards.loss_spike": _GUARD,
    "guards.loss_spike_z": _GUARD,
    "guards.loss_spike_ratio": _GUARD,
    "guards.grad_norm_spike": _GUARD,
    "guards.grad_norm_spike_z": _GUARD,
    "guards.grad_norm_spike_ratio": _GUARD,
    "guards.window": _GUARD,
    "guards.divergence": _GUARD,
    "guards.divergence_ratio": _GUARD,
    "guards.flat_loss": _GUARD,
    "guards.flat_loss_steps": _GUARD,
    "guards.frozen_adapter": _GUARD,
    "guards.straggler": _GUARD,
    "guards.straggler_ratio": _GUARD,
    "guards.memory": _GUARD,
    "guards.memory_share": _GUARD,
    "guards.data_starvation": _GUARD,
    "guards.data_starvation_share": _GUARD,
    "guards.throttling": _GUARD,
    "guards.replica_check_steps": _GUARD,
    "guards.max_skips": _GUARD,
    "guards.max_rollbacks": _GUARD,
    **{f"cluster.{key}": _FREE for key in ClusterSection.model_fields},
}
_UNKNOWN = Verdict("refused", "resuming with a different value is not supported")
# Beside the sections of kept settings: digests of values that are kept as references.
DIGESTS = "value_digests"
# A longer run is still the same run: a preempted job may come back with more steps, or on other nodes; so may one that
# a guard or early stopping ended, with another guard or more patience.
_NOT_NAMING = {"train.num_train_epochs", "train.max_steps", "parallel.shard", "parallel.shard_size"} | {
    path for path in VERDICTS if path.startswith(("guards.", "train.early_stopping_"))
}


@dataclass(frozen=True)
class Change:
    """One setting that is not what it was when the checkpoint was written."""

    path: str
    old: Any
    new: Any
    verdict: Verdict

    def __str__(self) -> str:
        if self.old == self.new:  # both as they were written
            text = self.new if isinstance(self.new, str) else _show(self.new)
            return f"{self.path}: {text} resolves to another value ({self.verdict.meaning})"
        return f"{self.path}: {_show(self.old)} → {_show(self.new)} ({self.verdict.meaning})"


def kept_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings as a run's files keep them: without secrets, and `${VAR}` as it was written.

    A reference in a setting that changes numbers has a digest of its value beside it, so that another value is noticed.
    """
    settings, values = redacted_settings(config), redacted_values(config)
    digests = {
        path: _digest(path, value)
        for section, fields in values.items()
        for name, value in fields.items()
        if settings[section][name] != value and _changes_numbers(path := f"{section}.{name}")
    }
    return {**settings, DIGESTS: digests} if digests else settings


def changes(old: Settings, new: Settings) -> list[Change]:
    """What differs and matters, in the schema's order; settings that change no number are left out.

    A setting that one side does not know (written by another version) is not compared.
    """
    found = []
    for section, fields in new.items():
        for name, value in fields.items() if section != DIGESTS else ():
            path = f"{section}.{name}"
            if not _changes_numbers(path) or name not in old.get(section, {}):
                continue
            before = old[section][name]
            if not _same(path, (before, old.get(DIGESTS, {}).get(path)), (value, new.get(DIGESTS, {}).get(path))):
                found.append(Change(path, before, value, VERDICTS.get(path, _UNKNOWN)))
    return found


def identity(config: RunConfig) -> str:
    """What makes two configs the same run: a hash over every setting that changes its numbers, but not its length.

    Of values, not of how they are written: a path that comes from the environment today is the same path.
    """
    naming = {
        path: value
        for section, fields in redacted_values(config).items()
        for name, value in fields.items()
        if (path := f"{section}.{name}") not in _NOT_NAMING and _changes_numbers(path)
    }
    return hashlib.sha256(json.dumps(naming, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _changes_numbers(path: str) -> bool:
    return VERDICTS.get(path, _UNKNOWN).kind in ("notice", "refused")


def _same(path: str, old: tuple[Any, str | None], new: tuple[Any, str | None]) -> bool:
    """Whether two values are, each with its digest where a reference stands for it."""
    if old[1] is None and new[1] is None:
        return bool(_comparable(path, old[0]) == _comparable(path, new[0]))
    return (old[1] or _digest(path, old[0])) == (new[1] or _digest(path, new[0]))


def _digest(path: str, value: Any) -> str:
    text = json.dumps(_comparable(path, value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _comparable(path: str, value: Any) -> Any:
    """A folder is the same however it is written."""
    if path.endswith("_name_or_path") and isinstance(value, str) and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "…"
