"""What does a setting do under FSDP2, beyond its description? Shown by `shardtune explain`."""

from __future__ import annotations

FSDP2_EFFECTS: dict[str, str] = {
    "model.model_name_or_path": "The model is built on the meta device, and each rank reads only the rows of its own "
    "shards: no rank ever holds a whole model that is sharded.",
    "model.base_precision": "Frozen weights are sharded and all-gathered in this form, so fp8 halves both the memory "
    "of a shard and the bytes of every all-gather.",
    "lora.r": "Frozen weights have no gradients: only those of the adapters are reduced across ranks, and their size "
    "is proportional to r.",
    "lora.modules_to_save": "Their gradients are reduced across ranks in full, and weight, gradient and Adam state "
    "take 16 bytes per parameter, sharded like the adapters'.",
    "train.per_device_train_batch_size": "A forward pass gathers each layer once whatever the batch, so a larger batch "
    "spreads the same traffic over more tokens.",
    "train.gradient_accumulation_steps": "Gradients are reduced once per optimizer step, in the last pass. With "
    "reshard_after_forward: true every pass gathers the base twice; with false it is gathered once per step.",
    "train.gradient_checkpointing": "Recomputation runs while the layer is gathered for its backward pass: it costs "
    "compute, and no traffic.",
    "train.offload_activations": "It moves activations, which FSDP2 does not shard: each rank keeps those of its own "
    "batch. For parameters there is parallel.offload_params.",
    "train.optim": "It updates sharded tensors (DTensor): each rank updates its own shard of the adapters, and holds "
    "the optimizer state of that shard only.",
    "train.max_grad_norm": "The norm is taken over the shards of all ranks, so the same value clips alike on any "
    "number of GPUs. It costs one small all-reduce per step.",
    "train.bf16": "The mixed-precision policy of FSDP2: adapter shards are float32 and are cast to bfloat16 before "
    "they are gathered; gradients are reduced in parallel.reduce_dtype.",
    "train.compile": "Each layer is compiled inside its FSDP unit, so that gathering stays outside of the compiled "
    "code, and all layers share one compilation.",
    "train.seed": "Each adapter is drawn from the seed and its name, so that the initial values do not depend on the "
    "number of ranks or the sharding.",
    "train.fused_loss": "The output head belongs to the root unit, which stays gathered from forward to backward.",
    "parallel.nproc": "Each process holds one shard (parallel.shard) and computes its own batch.",
    "parallel.transformer_layer_cls_to_wrap": "Each such layer is one FSDP unit: what is gathered at once, and freed "
    "at once. Embeddings, final norm and head are the root unit.",
    "parallel.shard": "`full` and `hybrid` gather every layer in forward and again in backward, from all ranks or "
    "within the group; `replicate` gathers no frozen weight. Loss and gradients are the same up to rounding.",
    "parallel.shard_size": "The device mesh is (replicas, shard_size): all-gathers stay within a group, and between "
    "groups only adapter gradients are reduced.",
    "parallel.reshard_after_forward": "true is ZeRO-3 (two all-gathers of a layer per pass), false is ZeRO-2 (one per "
    "step, and memory for the whole gathered base). The root unit is never resharded in between.",
    "parallel.forward_prefetch": "Layer i+1 … i+N are all-gathered on another stream while layer i computes; each "
    "layer ahead needs the memory of a gathered layer. FSDP2's own default is 0.",
    "parallel.backward_prefetch": "The same for the backward pass; 0 needs least memory, and exposes every all-gather.",
    "parallel.offload_params": "CPUOffloadPolicy: every all-gather copies shards from pinned host memory first, and "
    "the optimizer runs on the CPU. Gradients are reduced in every pass, not once per step.",
    "parallel.reduce_dtype": "The dtype of the reduce-scatter of adapter gradients. With LoRA they are megabytes, so "
    "bfloat16 saves little.",
    "parallel.step_timeout_minutes": "The process group's own timeout is a minute longer than the longest deadline, so "
    "that the watchdog names the rank and the reason before NCCL aborts.",
}
