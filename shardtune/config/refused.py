"""Which settings of other tools does shardtune not have, and what to use instead?

A field of TRL's SFTConfig (transformers' TrainingArguments included) is either a setting here under the same name, or
stands in `TRL_NAMES`: a test asks the installed TRL for its fields, so that one a new version adds is decided there.
"""

from __future__ import annotations

from typing import Any

_SHUFFLED = "rows are shuffled by `train.data_seed`, and each is used once per epoch"
_GROUPED = f"{_SHUFFLED}; to save the padding that grouping by length is for, use `train.packing`"
_COMPILED = "use `train.compile`, which compiles each decoder layer"
_KERNELS = "shardtune has its own fused kernels; use `train.kernels`"
_LOSS_ONLY = "evaluation computes the loss per supervised token over all ranks, and no other metric"
_BEST = "the one with the lowest validation loss is published; `shardtune best --metric` chooses another afterwards"
_LOGS = "rank 0 writes the log; `shardtune train -v` writes more"
_UPLOAD = "shardtune uploads nothing; upload the adapter in final/ yourself (`hf upload`)"
_DDP = "it is a DDP setting, and shardtune shards with FSDP2"
_SHARDED = "shardtune shards with FSDP2; use the section `parallel`"
_EVAL_DTYPE = "evaluation computes in the same precision as training; use `train.bf16`"

# Fields of SFTConfig that are not settings of the same name here.
TRL_NAMES: dict[str, str] = {
    # Model, sharding, processes
    "model_init_kwargs": "use the section `model`",
    "fsdp": _SHARDED,
    "fsdp_config": "use the section `parallel`, or `parallel.accelerate_config` for a file of accelerate",
    "deepspeed": _SHARDED,
    "parallelism_config": "use `parallel.shard` and `shard_size`; tensor and context parallelism are not supported",
    "accelerator_config": "batches are not split by accelerate; use `train.per_device_train_batch_size`",
    "use_cpu": "use `parallel.device: cpu`",
    "local_rank": "the launcher sets each process's rank; remove it",
    "ddp_backend": "it is gloo on CPUs and NCCL on GPUs; use `parallel.device`",
    "ddp_timeout": "use `parallel.step_timeout_minutes`",
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "activation_offloading": "use `train.offload_activations`",
    "gradient_checkpointing_kwargs": "checkpointing is always non-reentrant; use `train.gradient_checkpointing`",
    "torch_compile": _COMPILED,
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    # Data
    "chat_template_path": "use `data.chat_template`",
    "dataset_text_field": "use `data.text_field`",
    "dataset_kwargs": "shardtune tokenises the data itself; use the section `data`",
    "dataset_num_proc": "all cores tokenise; `shardtune data prepare --workers N` uses N",
    "truncation_mode": "rows are truncated at their end; use `data.long_rows` and `data.max_length`",
    "shuffle_dataset": _SHUFFLED,
    "train_sampling_strategy": _GROUPED,
    "length_column_name": _GROUPED,
    "eos_token": "rows end with the tokenizer's own end-of-sequence token; use `data.append_eos`",
    "pad_token": "padding is masked by position, so any token will do; remove it",
    "pad_to_multiple_of": "rows are padded to `data.max_length` where compiled code needs one shape",
    "completion_only_loss": "use `data.train_on: completion`",
    "assistant_only_loss": "use `data.train_on: assistant`",
    "packing_strategy": "rows are packed best-fit; use `train.packing`",
    "eval_packing": "validation rows are packed like training rows; use `train.packing`",
    "padding_free": "packed rows have no padding; use `train.packing`",
    "remove_unused_columns": "only the columns of the format are read; use `data.format`",
    "label_names": "labels are made from the supervised tokens; use `data.train_on`",
    "dataloader_drop_last": f"{_SHUFFLED}; no batch is dropped",
    "dataloader_in_order": "batches always come in order, so that a run can be repeated; remove it",
    "dataloader_multiprocessing_context": "workers are always forked, to share the memory-mapped rows; remove it",
    # Loss, optimizer, batch
    "loss_type": "use `train.loss`",
    "average_tokens_across_devices": "always on: the loss is averaged over the supervised tokens of all ranks",
    "optim_target_modules": "GaLore, APOLLO and LOMO, which read it, do not support sharded tensors; remove it",
    "auto_find_batch_size": "ranks could end up with different batch sizes; set `train.per_device_train_batch_size`",
    # Evaluation
    "do_eval": "use `train.eval_strategy`",
    "bf16_full_eval": _EVAL_DTYPE,
    "fp16_full_eval": _EVAL_DTYPE,
    "prediction_loss_only": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    # Checkpoints
    "resume_from_checkpoint": "use `train.resume`",
    "save_only_model": "a checkpoint always holds adapter, optimizer, schedule and random state; remove it",
    "save_on_each_node": "rank 0 writes each checkpoint once; remove it",
    "enable_jit_checkpoint": "always on: SIGTERM saves a checkpoint; use `train.grace_seconds`",
    "ignore_data_skip": "a resumed run continues with the rows it has not seen in this epoch; remove it",
    "restore_callback_states_from_checkpoint": "always on: the state of callbacks is saved and restored",
    # Logs and uploads
    "logging_nan_inf_filter": "it hides a NaN loss; use `guards.non_finite`",
    "log_on_each_node": _LOGS,
    "log_level": _LOGS,
    "log_level_replica": _LOGS,
    "disable_tqdm": "there is no progress bar where stderr is not a terminal; remove it",
    "include_num_input_tokens_seen": "tokens are always counted; remove it",
    "skip_memory_metrics": "memory is always measured, every `train.debug_freq` steps; remove it",
    "debug": "loss and gradients of each step are checked; use the section `guards`",
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
    "hub_private_repo": _UPLOAD,
    "hub_strategy": _UPLOAD,
    "hub_always_push": _UPLOAD,
    "hub_revision": _UPLOAD,
    # The resolved config is written to the run folder: a secret in it would be, too.
    "hub_token": "it would be written to the run folder in clear text; set the environment variable HF_TOKEN",
    # Commands
    "do_train": "`shardtune train` trains; remove it",
    "do_predict": "`train.samples` shows answers before and after training",
}  # fmt: skip

_FP8 = "use `model.base_precision: fp8`"
_NF4 = (
    "4-bit weights (QLoRA, NF4) are not supported: bitsandbytes quantises a whole weight before it is sharded, and has "
    f"no fused experts; {_FP8}"
)
_NEEDS_WHOLE = "decomposes whole weights, and no rank holds a whole one; use use_rslora: true with a higher r"
_NEW_TOKENS = 'tokens to be learned are listed in the section `model`; use `model.new_tokens: ["<|tool|>"]`'

# Names of PEFT's LoraConfig, of BitsAndBytesConfig, of tools that pass both on, and of older versions of transformers.
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("response_template", "instruction_template"),
        "which tokens are supervised follows from the data: use `data.train_on` (completion, assistant, all)",
    ),
    "streaming": "rows are not streamed: they are tokenised once, cached in `data.cache_dir` (5 bytes per token) and "
    "memory-mapped, so memory does not grow with the dataset; `shardtune data prepare CONFIG` does it ahead of time",
    **dict.fromkeys(
        ("load_in_4bit", "quantization_config", "bnb_config", "quantization_bit", "bnb_4bit_compute_dtype",
         "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"),
        _NF4,
    ),
    "load_in_8bit": f"8-bit weights of bitsandbytes are not supported: they are quantised before sharding; {_FP8}",
    "use_qalora": f"QA-LoRA adapts 4-bit GPTQ weights, which are not supported; {_FP8}",
    "loftq_config": f"LoftQ prepares adapters for 4-bit weights, which are not supported; {_FP8}",
    "eva_config": f"EVA {_NEEDS_WHOLE}",
    "corda_config": f"CorDA {_NEEDS_WHOLE}",
    "lora_ga_config": f"LoRA-GA {_NEEDS_WHOLE}",
    "peft_type": "only LoRA is supported; for as few parameters as VeRA or LoHa have, set a small r",
    "layers_pattern": "layers_to_transform counts the decoder layers, which are found by their class; remove it",
    "target_parameters": "fused experts and routers are named in target_modules like linear layers; use "
    "target_modules: [experts], or a name such as experts.down_proj",
    **dict.fromkeys(
        ("trainable_token_indices", "added_tokens", "add_tokens", "special_tokens", "additional_special_tokens"),
        _NEW_TOKENS,
    ),
    "lora_bias": "a bias inside the adapter has no fused form, and most servers do not load it; `lora.bias: lora_only` "
    "trains the biases of adapted layers",
    "layer_replication": "layers are loaded as the checkpoint has them; save the larger model first",
    "fan_in_fan_out": "only linear layers are adapted, and they are never stored transposed; remove it",
    "logging_dir": "trackers write to the run folder; remove it",
    "group_by_length": _GROUPED,
    "overwrite_output_dir": "each run has its own folder, so nothing is overwritten; remove it",
    "save_safetensors": "weights are always saved as safetensors; remove it",
    "torchdynamo": _COMPILED,
    "wandb_project": "set the environment variable WANDB_PROJECT",
    "include_tokens_per_second": "tokens per second are always logged; remove it",
}  # fmt: skip


def refusal(key: str, value: Any) -> str:
    """Why shardtune has no such setting and what to use instead; "" for a name that no table has."""
    if key in OTHER_NAMES and value in (None, False, "", [], {}):
        return "what it turns off is never on; remove it"
    return TRL_NAMES.get(key) or OTHER_NAMES.get(key, "")
