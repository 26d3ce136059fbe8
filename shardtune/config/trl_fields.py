"""Which settings of TRL may be passed on through `train.extra`? Those that have an effect here, and no other.

One table of what is allowed and one of what is refused, with the reason; a test asks the installed TRL for its fields,
so that one a new version adds is decided there instead of being accepted and doing nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardtune.config.problems import shown
from shardtune.config.suggestions import FOREIGN_KEYS, nearest, section_fields

_SIMPLE: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict}
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "dict": "a mapping",
          "None": "null"}  # fmt: skip


@dataclass(frozen=True)
class Extra:
    """A setting of TRL that is passed on: its types, the words it takes if these are few, and its range."""

    kinds: tuple[str, ...]
    choices: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None

    def fits(self, value: Any) -> bool:
        if value is None:
            return "None" in self.kinds
        if not any(_is(value, kind) for kind in self.kinds) or (self.choices and value not in self.choices):
            return False
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (self.least is None or value >= self.least) and (self.below is None or value < self.below)

    def words(self) -> str:
        if self.choices:
            return "one of: " + ", ".join(self.choices)
        limits = [f"at least {self.least:g}"] if self.least is not None else []
        limits += [f"below {self.below:g}"] if self.below is not None else []
        return ", ".join([", or ".join(_WORDS[kind] for kind in self.kinds), *limits])


# What each changes is measured in tests/train/test_extra.py.
ALLOWED: dict[str, Extra] = {
    "adam_beta1": Extra(("float",), least=0, below=1),
    "adam_beta2": Extra(("float",), least=0, below=1),
    "adam_epsilon": Extra(("float",), least=0),
    "lr_scheduler_kwargs": Extra(("dict", "None")),
    "neftune_noise_alpha": Extra(("float", "None"), least=0),
    "router_aux_loss_coef": Extra(("float", "None"), least=0),
    "full_determinism": Extra(("bool",)),
    "tf32": Extra(("bool", "None")),
    "torch_empty_cache_steps": Extra(("int", "None"), least=1),
    "data_seed": Extra(("int", "None"), least=0),
    "dataloader_num_workers": Extra(("int",), least=0),
    "dataloader_pin_memory": Extra(("bool",)),
    "dataloader_persistent_workers": Extra(("bool",)),
    "dataloader_prefetch_factor": Extra(("int", "None"), least=1),
    "eval_delay": Extra(("float",), least=0),
    "eval_on_start": Extra(("bool",)),
    "logging_first_step": Extra(("bool",)),
    "logging_strategy": Extra(("str",), choices=("no", "steps", "epoch")),
    # Read by trackers (train.report_to).
    "run_name": Extra(("str", "None")),
    "project": Extra(("str",)),
    "trackio_space_id": Extra(("str", "None")),
    "trackio_bucket_id": Extra(("str", "None")),
    "trackio_static_space_id": Extra(("str", "bool", "None")),
}

_PREPARES_DATA = "shardtune tokenises the data itself, so TRL would never read it"
_SHARDS = "shardtune shards the model itself, before TRL sees it"
_STORES = "shardtune writes and restores checkpoints itself"

_TRACKS = "shardtune writes its own log lines, from rank 0; -v says more"
_EVALUATES = "shardtune evaluates itself: the loss per supervised token over all ranks, and nothing else"
_ORDERS = "rows are dealt out in an order given by `train.seed`, each once an epoch"
_PUSHES = "nothing would be pushed: shardtune writes the adapter to final/; upload it from there (`hf upload`)"
_FUSES = "shardtune has fused code of its own: `train.kernels`"

# Settings of TRL that do nothing here, or would undo what makes a sharded run right: each with what to use instead.
REFUSED: dict[str, str] = {
    # The model arrives loaded, adapted and sharded.
    "model_init_kwargs": "shardtune loads the model; use the section `model`",
    "fsdp": f"{_SHARDS}; use the section `parallel`",
    "fsdp_config": f"{_SHARDS}; use the section `parallel`, or `parallel.accelerate_config` for an accelerate file",
    "deepspeed": "shardtune shards with FSDP2 only; use the section `parallel`",
    "parallelism_config": f"{_SHARDS}; use the section `parallel`",
    "accelerator_config": "it can change how batches are dealt out to ranks, which shardtune decides",
    "torch_compile": "accelerate would compile the whole model after it was sharded",
    "torch_compile_backend": "accelerate would compile the whole model after it was sharded",
    "torch_compile_mode": "accelerate would compile the whole model after it was sharded",
    "activation_offloading": "it moves whatever any layer saves; use `train.offload_activations`",
    "gradient_checkpointing_kwargs": "only the non-reentrant form works with FSDP2; `train.gradient_checkpointing` "
    "says what is recomputed",
    # It halves the batch and wraps the model a second time, which a sharded model does not survive.
    "auto_find_batch_size": "a batch size tried after sharding would differ between ranks; set "
    "`train.per_device_train_batch_size`",
    # They cast the parameters in place, float32 master weights of the adapters included.
    "bf16_full_eval": "it would cast the adapters' float32 weights; `train.bf16` covers evaluation",
    "fp16_full_eval": "it would cast the adapters' float32 weights; `train.bf16` covers evaluation",
    "optim_target_modules": "only GaLore and its kin read it, and they do not handle sharded tensors",
    # Without it the loss depends on how rows fall on ranks: 1 and 2 processes would train differently.
    "average_tokens_across_devices": "always on here: it makes one and many processes compute the same loss",
    # The rows arrive tokenised, cut and masked.
    "chat_template_path": _PREPARES_DATA,
    "dataset_text_field": f"{_PREPARES_DATA}; use `data.text_field`",
    "dataset_kwargs": _PREPARES_DATA,
    "dataset_num_proc": _PREPARES_DATA,
    "truncation_mode": f"{_PREPARES_DATA}; rows are cut at their end to `data.max_length`",
    "shuffle_dataset": "rows are already dealt out in an order given by `train.seed`",
    "eos_token": f"{_PREPARES_DATA}; `data.append_eos` ends rows with the tokenizer's own",
    "pad_token": f"{_PREPARES_DATA}; padding carries no loss whatever the token",
    "completion_only_loss": f"{_PREPARES_DATA}; use `data.train_on`",
    "assistant_only_loss": f"{_PREPARES_DATA}; use `data.train_on`",
    "packing_strategy": "rows are packed best-fit: set train.packing",
    "eval_packing": "validation is packed like training: set train.packing",
    "padding_free": "follows from train.packing and the attention code",
    "remove_unused_columns": "the rows hold exactly the columns the model takes",
    # Checkpoints are adapter-sized and written to a staging folder first.
    "save_only_model": f"{_STORES}: adapter, optimizer, scheduler and random state",
    "save_on_each_node": f"{_STORES}, once, on rank 0",
    "enable_jit_checkpoint": f"{_STORES}, also when the job is told to stop",
    "resume_from_checkpoint": _STORES,
    "ignore_data_skip": f"{_STORES}; a resumed run goes on with the rows it has not seen",
    "restore_callback_states_from_checkpoint": _STORES,
    "metric_for_best_model": "the best checkpoint is the one with the lowest validation loss",
    "greater_is_better": "the best checkpoint is the one with the lowest validation loss",
    # The loss is fused with the head: there are no logits to smooth or to weigh.
    "loss_type": "the loss is the negative log-likelihood of the supervised tokens; others are not built in",
    "label_smoothing_factor": "the loss is fused with the head, which gives no logits to smooth",
    "use_liger_kernel": _FUSES,
    "liger_kernel_config": _FUSES,
    "optim_args": "the optimizers of `train.optim` do not read it; use adam_beta1, adam_beta2 and adam_epsilon",
    # Batches.
    "train_sampling_strategy": f"{_ORDERS}; `train.packing` saves the padding that grouping by length is for",
    "length_column_name": _ORDERS,
    "dataloader_drop_last": _ORDERS,
    "dataloader_in_order": _ORDERS,
    "dataloader_multiprocessing_context": "workers are forked: they share the memory-mapped rows",
    "pad_to_multiple_of": "rows are filled up to `data.max_length` where compiled code wants one shape",
    "label_names": "the rows hold exactly the columns the model takes",
    # Evaluation.
    "prediction_loss_only": _EVALUATES,
    "eval_do_concat_batches": _EVALUATES,
    "eval_use_gather_object": _EVALUATES,
    "eval_accumulation_steps": _EVALUATES,
    "include_for_metrics": _EVALUATES,
    "batch_eval_metrics": _EVALUATES,
    # What is logged.
    "logging_nan_inf_filter": "it shows an old loss while NaN reaches the weights; use the section `guards`",
    "log_on_each_node": _TRACKS,
    "log_level": _TRACKS,
    "log_level_replica": _TRACKS,
    "include_num_input_tokens_seen": "tokens are always counted: `tokens` in the events",
    "skip_memory_metrics": "memory is always measured: the `profile` events",
    "debug": "the section `guards` looks at loss and gradients of each step",
    "push_to_hub": _PUSHES,
    "hub_model_id": _PUSHES,
    "hub_private_repo": _PUSHES,
    "hub_strategy": _PUSHES,
    "hub_always_push": _PUSHES,
    "hub_revision": _PUSHES,
    # Processes and devices.
    "use_cpu": "use `parallel.device: cpu`",
    "local_rank": "the launcher gives each process its rank",
    "ddp_backend": "gloo on CPU and NCCL on GPUs; `parallel.device` chooses",
    "ddp_timeout": "use `parallel.step_timeout_minutes`",
    "ddp_bucket_cap_mb": "it belongs to DDP; sharding is FSDP2",
    "ddp_broadcast_buffers": "it belongs to DDP; sharding is FSDP2",
    "ddp_static_graph": "it belongs to DDP; sharding is FSDP2",
    # The command line decides what is done and how it is shown.
    "do_train": "`shardtune train` trains",
    "do_eval": "use `train.eval_strategy`",
    "do_predict": "`shardtune train` trains",
    "disable_tqdm": "shardtune draws its own progress, and plain lines where there is no terminal",
    # The resolved config is written to the run folder: a secret in it would be, too.
    "hub_token": "it would be written to the run folder in clear; set the environment variable HF_TOKEN",
}

# Settings that older versions had; people still copy them.
_REMOVED = {
    "logging_dir": "transformers no longer has it; trackers write to the run folder",
    "group_by_length": "rows are dealt out in a random order; `train.packing` saves the padding that grouping is for",
    "overwrite_output_dir": "each run gets a folder of its own, nothing is overwritten",
    "save_safetensors": "transformers no longer has it; weights are always written as safetensors",
    "neftune_alpha": "TRL calls it `neftune_noise_alpha`",
    "torchdynamo": "transformers no longer has it",
    "include_tokens_per_second": "transformers no longer has it; shardtune always shows tokens per second",
}


def check_extra(name: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with `train.extra.<name>: value`?

    Returns:
        (what, fix), or None when TRL can have it.
    """
    if name in REFUSED:
        return "this setting cannot be passed on", REFUSED[name]
    owners = [section for section, model in section_fields().items() if name in model.model_fields]
    if owners:
        return "shardtune has a setting of its own for this", f"set `{owners[0]}.{name}`"
    if name not in ALLOWED:
        return "TRL has no such setting that could be passed on", _meant(name)
    extra = ALLOWED[name]
    if extra.fits(value):
        return None
    close = nearest(value, extra.choices) if isinstance(value, str) else None
    return f"expected {extra.words()}; got {shown(value)}", f"did you mean `{close}`?" if close else ""


def as_trl_takes(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`train.extra` with whole numbers (YAML's `0`) as floats where TRL has a float, and may refuse an int."""
    return {
        name: float(value) if "float" in ALLOWED[name].kinds and value is not None else value
        for name, value in extra.items()
    }


def _meant(name: str) -> str:
    if name in _REMOVED:
        return _REMOVED[name]
    if name in FOREIGN_KEYS:
        return f"set `{FOREIGN_KEYS[name]}`"
    close = nearest(name, ALLOWED)
    return f"did you mean `{close}`?" if close else "docs/config-reference.md lists what can be"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # Python's True is an int; YAML's true is not a number.
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float)
    return kind in _SIMPLE and isinstance(value, _SIMPLE[kind])
