"""How long does one decoder layer take? Operations and bytes, counted from its shapes, over what the GPU reaches.

A product of n weights with a token is 2n operations forward and 2n backward, for the gradient of its input: the base is
frozen. Everything between the products is limited by memory, so its bytes are counted. What a compiled layer reads and
writes was counted by hand for a gated MLP and rotary attention; the few numbers below that could not be counted were
fitted to measured runs (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from shardtune.plan.catalogue import Gpu
from shardtune.plan.facts import Facts, LayerKind
from shardtune.plan.memory import fp8_weights
from shardtune.plan.work import Work

# Fitted on an H200.
_GROUPED = 0.81  # share of the rate of plain products that grouped ones reach, with the experts unevenly loaded
_LOW_RANK = 0.76  # share of the memory's bandwidth that products of low rank reach
# Tokens at which attention reaches half of its rate: in short rows, blocks on the diagonal are computed for nothing.
_RAMP = 1000
# The exponential of a score takes as long as this many of a head's products: heads of 64 reach 0.72 of the rate that
# heads of 128 do, for which the catalogue's rates are.
_SOFTMAX, _HEAD = 80, 128

# Values read and written per token by a compiled layer between its products: (forward, backward).
_OF_RESIDUAL = (10, 14)  # times its width: two norms, two additions, sums of gradients
_OF_ATTENTION = (6, 8)  # times the queries' width: rotary embeddings, repeating keys and values, transposing
_OF_ACTIVATION = (3, 5)  # times the MLP's width: gate, up and result; two gradients more
_OF_ROUTING = (9, 15)  # times the width of all rows sent to experts, sorted and put back (slower than in order), summed
_COUNTED = 1.2  # what is read and written over what the four lines above count
_EAGER = 4.0  # uncompiled, each operation reads and writes by itself, norms in float32

# Values read and written per adapted product: (of its input, of its output), forward and backward.
_FUSED_LORA = ((1, 2), (3, 2))
_PLAIN_LORA = ((1, 6), (5, 4))  # as PEFT computes it: scaled and added in operations of their own
_EXPERT_LORA = ((1, 4), (5, 2))

_ATTENTION_BACKWARD = 2.5  # times the operations of the forward pass: scores are computed again
_FLOAT32 = 1 / 15  # of the bf16 rate, without TF32


@dataclass(frozen=True)
class Cost:
    """Seconds, by what they are spent on."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    adapters: float = 0.0
    dequantise: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(times * getattr(self, each.name) for each in fields(Cost)))

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise + self.adapters + self.dequantise


@dataclass(frozen=True)
class Passes:
    """A layer, or several: forward, and backward with what is recomputed for it."""

    forward: Cost = Cost()
    backward: Cost = Cost()

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Passes:
        return Passes(self.forward * times, self.backward * times)


@dataclass(frozen=True)
class Product:
    """A weight and how it is used.

    Attributes:
        inputs: Width of what it is multiplied with.
        visits: How often a token is multiplied with it: once, or with k of the experts.
        experts: How many there are of it.
        rank: Of its adapter; 0 = none.
        fp8: It is stored in float8.
    """

    name: str
    inputs: int
    outputs: int
    visits: int
    experts: int
    rank: int
    fp8: bool


def layer_passes(facts: Facts, kind: LayerKind, work: Work, gpu: Gpu, tokens: float) -> Passes:
    """One layer of this kind in one micro-batch of so many tokens, padding too."""
    layer = _Layer(facts, kind, tuple(products_of(facts, kind, work)), work, gpu, tokens)
    forward, backward = layer.cost(0), layer.cost(1)
    if work.checkpointing == "full":
        backward += forward
    elif work.checkpointing == "selective":
        backward += Cost(elementwise=forward.elementwise)
    return Passes(forward, backward)


def products_of(facts: Facts, kind: LayerKind, work: Work) -> Iterator[Product]:
    """The weights that tokens are multiplied with: matrices, and those of routed experts."""
    codes = fp8_weights(kind) if work.fp8 else frozenset()
    for name, shape in kind.parameters.items():
        # A matrix per expert has three dimensions, and so has a convolution over time; experts' biases have two.
        if name.endswith("bias") or not (len(shape) == 2 or (len(shape) == 3 and "experts." in name)):
            continue
        experts = shape[0] if len(shape) == 3 else 1
        visits = min(experts, facts.experts_per_token) if experts > 1 else 1
        rank = kind.adapted.get(name.removesuffix(".weight"), 0)
        yield Product(name, shape[-1], shape[-2], visits, experts, rank, name in codes)


def multiplies_fp8(work: Work, gpu: Gpu) -> bool:
    return work.fp8_compute and gpu.fp8_tflops > 0


def matmul_rate(work: Work, gpu: Gpu, *, fp8: bool = False) -> float:
    """Operations per second."""
    if fp8:
        return gpu.fp8_tflops * 1e12
    slower = _FLOAT32 if work.value_bytes == 4 and gpu.device == "cuda" else 1.0
    return gpu.matmul_tflops * 1e12 * slower


@dataclass(frozen=True)
class _Layer:
    """A layer in one micro-batch. A direction is 0 for forward, 1 for backward without what is recomputed for it."""

    facts: Facts
    kind: LayerKind
    products: tuple[Product, ...]
    work: Work
    gpu: Gpu
    tokens: float

    def cost(self, direction: int) -> Cost:
        attention = self._attention()
        return Cost(
            products=sum(map(self._product, self.products)),
            attention=attention * _ATTENTION_BACKWARD if direction else attention,
            elementwise=self._elementwise(direction),
            adapters=self._adapters(direction),
            dequantise=self._dequantise(direction),
        )

    def _product(self, product: Product) -> float:
        """Limited by arithmetic, or by reading the weights and the activations once."""
        rows, size = self.tokens * product.visits, product.inputs * product.outputs
        in_fp8 = product.fp8 and multiplies_fp8(self.work, self.gpu)
        rate = matmul_rate(self.work, self.gpu, fp8=in_fp8) * (_GROUPED if product.experts > 1 else 1.0)
        stored = product.experts * size * (1 if in_fp8 else self.work.value_bytes)
        moved = stored + rows * (product.inputs + product.outputs) * self.work.value_bytes
        return max(2 * rows * size / rate, self._moving(moved))

    def _attention(self) -> float:
        """Forward. Pairs of a query and a key that it sees, within a document and a window."""
        work, gpu, width = self.work, self.gpu, attention_width(self.facts, self.kind)
        if width == 0:
            return 0.0
        length = work.document if work.packed and work.document else self.tokens / work.batch
        reach = min(length, self.kind.window or length)
        pairs = self.tokens * (reach - reach**2 / (2 * length))
        # Windows and documents go through the variable-length kernel, whole rows through the faster one.
        tflops = gpu.varlen_tflops if work.packed or reach < length else gpu.attention_tflops
        once = 4 * pairs * width / (tflops * 1e12)
        if gpu.device == "cpu":
            return once
        small_heads = max(1.0, (1 + _SOFTMAX / _head_width(self.facts, width)) / (1 + _SOFTMAX / _HEAD))
        return once * small_heads * (1 + _RAMP / reach) * (2.0 if work.value_bytes == 4 else 1.0)

    def _elementwise(self, direction: int) -> float:
        hidden, products = self.facts.hidden, self.products
        values = (
            _OF_RESIDUAL[direction] * hidden
            + _OF_ATTENTION[direction] * attention_width(self.facts, self.kind)
            + _OF_ACTIVATION[direction] * sum(p.visits * p.inputs for p in products if _is_down(p.name))
            + _OF_ROUTING[direction] * hidden * max((p.visits for p in products if p.experts > 1), default=0)
        )
        moved = values * self.work.value_bytes * _COUNTED * (1.0 if self.work.compiled else _EAGER)
        if multiplies_fp8(self.work, self.gpu):
            # Read, and written as codes: inputs once for all products that share them, and every gradient.
            inputs = {(_parent(p.name), p.inputs): p.visits * p.inputs for p in products}
            rounded = sum(p.visits * p.outputs for p in products) if direction else sum(inputs.values())
            moved += rounded * (self.work.value_bytes + 1)
        return self._moving(self.tokens * moved)

    def _adapters(self, direction: int) -> float:
        moved = 0
        for product in self.products:
            if product.rank:
                plain = _FUSED_LORA if self.work.fused_lora else _PLAIN_LORA
                of_input, of_output = (_EXPERT_LORA if product.experts > 1 else plain)[direction]
                moved += product.visits * (of_input * product.inputs + of_output * product.outputs)
        return self._moving(self.tokens * moved * self.work.value_bytes) / _LOW_RANK

    def _dequantise(self, direction: int) -> float:
        """Codes read, and values written for the product; or written transposed, for a backward one in FP8."""
        codes = sum(p.experts * p.inputs * p.outputs for p in self.products if p.fp8)
        if multiplies_fp8(self.work, self.gpu):
            return self._moving(codes * 2 * direction)
        return self._moving(codes * (1 + self.work.value_bytes))

    def _moving(self, moved: float) -> float:
        """Seconds to read or write so many bytes."""
        return moved / (self.gpu.bandwidth_gbs * 1e9)


def attention_width(facts: Facts, kind: LayerKind) -> int:
    """Mean of the widths of all heads' keys and of their values; 0 in a layer without softmax attention."""
    outputs = [shape for name, shape in kind.parameters.items() if _is_attention_output(name)]
    if not outputs:
        return 0
    values, model = outputs[0][-1], facts.model
    of_key = (model.get("qk_nope_head_dim") or 0) + (model.get("qk_rope_head_dim") or 0)
    keys = of_key * int(model["num_attention_heads"]) if of_key else values
    return int(keys + values) // 2


def _head_width(facts: Facts, width: int) -> float:
    heads = facts.model.get("num_attention_heads")
    return width / int(heads) if heads else _HEAD


def _is_attention_output(name: str) -> bool:
    is_attention = name.startswith(("self_attn.", "attention."))
    return is_attention and name.removesuffix(".weight").endswith(("o_proj", "out_proj", "dense"))


def _is_down(name: str) -> bool:
    """The MLP's last product, whose input is as wide as what its activation function returns."""
    return name.removesuffix(".weight").endswith(("down_proj", "w2", "fc2", "output_linear", "dense_4h_to_h"))


def _parent(name: str) -> str:
    """`self_attn` of `self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[0]
