"""What does a rank do in a step? Everything that memory and time depend on, beside the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]


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
