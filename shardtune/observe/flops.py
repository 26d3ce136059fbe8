"""How much must be computed in a step? Floating-point operations, from what one forward and backward pass really did.

A product of n weights with one token is 2n operations forward, 2n backward if the gradient of its input is needed, and
2n if the weights train. A frozen base with adapters therefore costs 4n for a token, not 6n, and less below the first
adapter, where nothing needs a gradient. What needs one is not guessed: a `FlopRecorder` watches the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardtune.observe.batches import BatchCount, attended_pairs


@dataclass(frozen=True)
class Cost:
    """Operations per unit (a token, or a pair of tokens in attention).

    Args:
        again: Forward once more in the backward pass: recomputation (activation checkpointing).
    """

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    @property
    def needed(self) -> float:
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class FlopFormula:
    """What a batch costs.

    Args:
        token: Of each token in all matrix products but the head.
        head: Of each token whose logits are computed.
        pairs: Of each (query, key) pair, over all layers with the same attention window (None: no window).
        head_scores_all: Logits are computed for every token, not only for those that carry loss.
    """

    token: Cost
    head: Cost
    pairs: Mapping[int | None, Cost]
    head_scores_all: bool = False

    def needed(self, batch: BatchCount) -> float:
        """What the training asks for: real tokens, logits where there is loss, attention within documents."""
        attention = sum(cost.needed * attended_pairs(batch.lengths, window) for window, cost in self.pairs.items())
        return self.token.needed * batch.real + self.head.needed * batch.supervised + attention

    def executed(self, batch: BatchCount) -> float:
        """What was computed for it: padding and recomputation too. Attention still counts within documents alone."""
        attention = sum(cost.executed * attended_pairs(batch.lengths, window) for window, cost in self.pairs.items())
        scored = batch.computed if self.head_scores_all else batch.supervised
        return self.token.executed * batch.computed + self.head.executed * scored + attention


@dataclass
class Product:
    """One weight (or the same weight of all experts) and what was seen of it in one micro-batch.

    Args:
        weights: How many numbers one row is multiplied with (of experts: of one expert).
        experts: How many there are of it.
        rows: Rows it was applied to in the forward pass: tokens, and for experts tokens times experts each visits.
        rows_again: Rows it was applied to again in the backward pass.
        trains: The weights get a gradient.
        input_gradient: Its input gets one.
        is_kept: Its result is kept for the backward pass, so that it is not made again where its layer is recomputed.
    """

    weights: float
    trains: bool
    experts: int = 1
    is_kept: bool = False
    input_gradient: bool = False
    rows: float = 0.0
    rows_again: float = 0.0

    def cost(self, tokens: int) -> Cost:
        once = 2.0 * self.weights * self.rows / tokens
        again = 2.0 * self.weights * self.rows_again / tokens
        return Cost(once, once * (self.trains + self.input_gradient), again)


@dataclass
class Scores:
    """The attention of one layer.

    Args:
        heads: Query heads.
        key_width: Of queries and keys, per head.
        value_width: Of values, per head. (Under MLA it is another.)
        window: How far back a token sees; None for all of its document.
        gradients: Which of "q", "k", "v" need a gradient.
    """

    heads: int
    key_width: int
    value_width: int
    window: int | None
    gradients: set[str] = field(default_factory=set)
    runs: int = 0
    runs_again: int = 0

    def cost(self) -> Cost:
        keys, values = 2.0 * self.heads * self.key_width, 2.0 * self.heads * self.value_width
        backward = 0.0
        if self.gradients & {"q", "k"}:
            backward += values  # the gradient of the weights comes first
        backward += keys * len(self.gradients & {"q", "k"}) + values * len(self.gradients & {"v"})
        forward = keys + values
        return Cost(forward * self.runs, backward * self.runs, forward * self.runs_again)


def formula(tokens: int, products: Iterable[Product], head: Product | None, attention: Iterable[Scores]) -> FlopFormula:
    """Args:
    tokens: All tokens of the micro-batch that was watched, padding too.
    head: The output layer. One that was never called as a module is computed from its weights, in tiles, where there
        is loss, forward and once more in the backward pass (TRL's fused head).
    """
    pairs: dict[int | None, Cost] = {}
    for layer in attention:
        pairs[layer.window] = pairs.get(layer.window, Cost()) + layer.cost()
    token = sum((product.cost(tokens) for product in products), Cost())
    if head is None:
        return FlopFormula(token, Cost(), pairs)
    if head.rows:
        return FlopFormula(token, head.cost(tokens), pairs, head_scores_all=True)
    once = 2.0 * head.weights
    return FlopFormula(token, Cost(once, once * (1 + head.trains), once), pairs)
