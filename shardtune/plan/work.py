"""What does a rank do in a step? Everything that memory and time depend on, beside the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardtune.config.batch import rows_per_process
from shardtune.config.cross_checks import effective_eval_strategy
from shardtune.config.optimizers import state_tensors
from shardtune.plan.sharding import within_a_node

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Facts

Checkpointing = Literal["none", "selective", "full"]
_CHECKPOINTING: dict[bool | str, Checkpointing] = {
    "auto": "none", False: "none", "none": "none", "selective": "selective", True: "full", "full": "full",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A step as one rank computes it. Alternatives are made with `dataclasses.replace`.

    Attributes:
        batch: Rows of a micro-batch.
        length: Tokens of a row, at most.
        eval_batch: Rows of a micro-batch of an evaluation; 0 = nothing is evaluated.
        accumulation: Micro-batches of an optimizer step.
        fill: Share of a row's tokens that are real.
        document: Tokens of an average document: within it, tokens see each other.
        packed: Several documents in one row.
        fp8: The base is held in float8.
        value_bytes: Of a value that is computed with: 2 in bf16, else 4.
        shards: Ranks that hold one replica of the base together; 1 = every rank holds all of it.
        reshard: A layer's gathered weights are freed after its forward pass.
        prefetch: Layers gathered ahead, the larger of forward and backward.
        reduce_bytes: Of a gradient value that is reduced.
        dropout: Adapters see their input after dropout.
        optimizer_bytes: Of the optimizer's state per trained parameter (8 for Adam's two float32 moments).
    """

    batch: int
    length: int
    eval_batch: int = 0
    accumulation: int = 1
    fill: float = 1.0
    document: float = 0.0
    packed: bool = False
    checkpointing: Checkpointing = "full"
    offload_activations: bool = False
    offload_params: bool = False
    fp8: bool = False
    fp8_compute: bool = False
    value_bytes: int = 2
    shards: int = 1
    reshard: bool = True
    prefetch: int = 1
    reduce_bytes: int = 4
    optimizer_bytes: int = 8
    compiled: bool = False
    fused_lora: bool = True
    fused_experts: bool = True
    fused_loss: bool = True
    dropout: bool = False

    @property
    def tokens(self) -> int:
        """Of a micro-batch, padding too."""
        return self.batch * self.length


def work_of(config: RunConfig, facts: Facts) -> Work:
    """What a rank does with these settings. What is still `auto` counts as what needs the most memory."""
    train, parallel, on_gpu = config.train, config.parallel, facts.machine.device == "cuda"
    batch, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    rows = rows_per_process(train, facts.machine.world_size)
    if batch == "auto":
        batch = rows // (1 if accumulation == "auto" else accumulation)
    return Work(
        batch=batch,
        length=config.data.max_length,
        eval_batch=train.per_device_eval_batch_size if effective_eval_strategy(config) != "no" else 0,
        accumulation=rows // batch,
        packed=train.packing is True or (train.packing == "auto" and "packing" not in facts.missing),
        checkpointing=_CHECKPOINTING[train.gradient_checkpointing],
        offload_activations=on_gpu and train.offload_activations is True,
        offload_params=on_gpu and parallel.offload_params is True,
        fp8=config.model.base_precision == "fp8",
        fp8_compute=train.fp8_compute is True,
        value_bytes=2 if train.bf16 is True or facts.dtype == "bfloat16" else 4,
        shards=shards_of(config, facts),
        reshard=parallel.reshard_after_forward is not False,
        prefetch=max(parallel.forward_prefetch, parallel.backward_prefetch),
        reduce_bytes=4 if parallel.reduce_dtype == "float32" else 2,
        optimizer_bytes=4 * state_tensors(train.optim, train.optim_args),
        compiled=train.compile is True,
        fused_lora=train.fused_lora is not False,
        fused_experts=train.fused_experts is not False and facts.has_experts,
        fused_loss=train.fused_loss is not False and facts.loss_obstacle is None,
        dropout=config.lora.lora_dropout > 0,
    )


def shards_of(config: RunConfig, facts: Facts) -> int:
    """Ranks that hold one replica of the base together; one where that is still `auto`."""
    inside = config.parallel.shard_size or within_a_node(facts.machine.nodes)
    return {"full": facts.machine.world_size, "hybrid": inside}.get(config.parallel.shard, 1)
