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
    products = list(products_of(facts, kind, work))
    forward, backward = (_pass(facts, kind, products, work, gpu, tokens, direction) for direction in (0, 1))
    if work.checkpointing == "full":
        backward += forward
    elif work.checkpointing == "selective":
        backward += Cost(elementwise=forward.elementwise)
    return Passes(forward, backward)


def products_of(facts: Facts, kind: LayerKind, work: Work) -> Iterator[Product]:
    """The weights that tokens are multiplied with: matrices, and those of routed experts."""
    for name, shape in kind.parameters.items():
        if len(shape) < 2 or "conv" in name:
            continue
        experts = shape[0] if len(shape) == 3 else 1
        visits = min(experts, experts_per_token(facts)) if experts > 1 else 1
        rank = kind.adapted.get(name.removesuffix(".weight"), 0)
        yield Product(name, shape[-1], shape[-2], visits, experts, rank, is_fp8(facts, kind, name) and work.fp8)


def experts_per_token(facts: Facts) -> int:
    for key in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk"):
        if key in facts.model:
            return int(facts.model[key])
    return 1


def is_fp8(facts: Facts, kind: LayerKind, name: str) -> bool:
    """Whether a base in float8 holds this one so: as the checkpoint does, or in one that does not, all but routers."""
    shape = kind.parameters[name]
    if facts.quantised:
        return name in kind.quantised
    experts = max((s[0] for s in kind.parameters.values() if len(s) == 3), default=0)
    return len(shape) >= 2 and "conv" not in name and not (len(shape) == 2 and shape[0] <= experts)


def _pass(
    facts: Facts, kind: LayerKind, products: list[Product], work: Work, gpu: Gpu, tokens: float, direction: int
) -> Cost:
    """direction: 0 forward, 1 backward, without what is recomputed for it."""
    attention = _attention_seconds(facts, kind, work, gpu, tokens)
    return Cost(
        products=sum(_product_seconds(product, work, gpu, tokens) for product in products),
        attention=attention * _ATTENTION_BACKWARD if direction else attention,
        elementwise=_elementwise_seconds(facts, kind, products, work, gpu, tokens, direction),
        adapters=_adapter_seconds(products, work, gpu, tokens, direction),
        dequantise=_dequantise_seconds(products, work, gpu, direction),
    )


def multiplies_fp8(work: Work, gpu: Gpu) -> bool:
    return work.fp8_compute and gpu.fp8_tflops > 0


def matmul_rate(work: Work, gpu: Gpu, *, fp8: bool = False) -> float:
    """Operations per second."""
    if fp8:
        return gpu.fp8_tflops * 1e12
    slower = _FLOAT32 if work.value_bytes == 4 and gpu.device == "cuda" else 1.0
    return gpu.matmul_tflops * 1e12 * slower


def _product_seconds(product: Product, work: Work, gpu: Gpu, tokens: float) -> float:
    """Limited by arithmetic, or by reading the weights and the activations once."""
    rows, size = tokens * product.visits, product.inputs * product.outputs
    in_fp8 = product.fp8 and multiplies_fp8(work, gpu)
    rate = matmul_rate(work, gpu, fp8=in_fp8) * (_GROUPED if product.experts > 1 else 1.0)
    stored = product.experts * size * (1 if in_fp8 else work.value_bytes)
    moved = stored + rows * (product.inputs + product.outputs) * work.value_bytes
    return max(2 * rows * size / rate, moved / _bandwidth(gpu))


def _attention_seconds(facts: Facts, kind: LayerKind, work: Work, gpu: Gpu, tokens: float) -> float:
    """Forward. Pairs of a query and a key that it sees, within a document and a window."""
    width = attention_width(facts, kind)
    if width == 0:
        return 0.0
    length = work.document if work.packed and work.document else min(work.length, tokens)
    reach = min(length, kind.window or length)
    pairs = tokens * (reach - reach**2 / (2 * length))
    # A window and documents are kept apart by the variable-length kernel, whole rows go through the faster one.
    tflops = gpu.varlen_tflops if work.packed or reach < length else gpu.attention_tflops
    once = 4 * pairs * width / (tflops * 1e12)
    if gpu.device == "cpu":
        return once
    small_heads = max(1.0, (1 + _SOFTMAX / _head_width(facts, width)) / (1 + _SOFTMAX / _HEAD))
    return once * small_heads * (1 + _RAMP / reach) * (2.0 if work.value_bytes == 4 else 1.0)


def attention_width(facts: Facts, kind: LayerKind) -> int:
    """Mean of the widths of all heads' keys and of their values; 0 in a layer without softmax attention."""
    outputs = [shape for name, shape in kind.parameters.items() if _is_attention_output(name)]
    if not outputs:
        return 0
    values = outputs[0][-1]
    model = facts.model
    of_key = (model.get("qk_nope_head_dim") or 0) + (model.get("qk_rope_head_dim") or 0)
    keys = of_key * int(model["num_attention_heads"]) if of_key else values
    return int(keys + values) // 2


def _head_width(facts: Facts, width: int) -> float:
    heads = facts.model.get("num_attention_heads")
    return width / int(heads) if heads else _HEAD


def _is_attention_output(name: str) -> bool:
    return name.startswith(("self_attn.", "attention.")) and name.removesuffix(".weight").endswith(
        ("o_proj", "out_proj", "dense")
    )


def _elementwise_seconds(
    facts: Facts, kind: LayerKind, products: list[Product], work: Work, gpu: Gpu, tokens: float, direction: int
) -> float:
    activated = sum(p.visits * p.inputs for p in products if _is_down(p.name))
    routed = facts.hidden * max((p.visits for p in products if p.experts > 1), default=0)
    values = (
        _OF_RESIDUAL[direction] * facts.hidden
        + _OF_ATTENTION[direction] * attention_width(facts, kind)
        + _OF_ACTIVATION[direction] * activated
        + _OF_ROUTING[direction] * routed
    )
    moved = values * work.value_bytes * _COUNTED * (1.0 if work.compiled else _EAGER)
    if multiplies_fp8(
        work, gpu
    ):  # read and written as codes: inputs once for all layers that share them, each gradient
        inputs = {(p.name.rpartition(".")[0].rpartition(".")[0], p.inputs): p.visits * p.inputs for p in products}
        rounded = sum(inputs.values()) if direction == 0 else sum(p.visits * p.outputs for p in products)
        moved += rounded * (work.value_bytes + 1)
    return tokens * moved / _bandwidth(gpu)


def _is_down(name: str) -> bool:
    """The MLP's last product, whose input is as wide as what its activation function returns."""
    return name.removesuffix(".weight").endswith(("down_proj", "w2", "fc2", "output_linear", "mlp.dense_4h_to_h"))


def _adapter_seconds(products: list[Product], work: Work, gpu: Gpu, tokens: float, direction: int) -> float:
    moved = 0.0
    for product in products:
        if product.rank:
            counts = _EXPERT_LORA if product.experts > 1 else _FUSED_LORA if work.fused_lora else _PLAIN_LORA
            of_input, of_output = counts[direction]
            moved += product.visits * (of_input * product.inputs + of_output * product.outputs)
    return tokens * moved * work.value_bytes / (_bandwidth(gpu) * _LOW_RANK)


def _dequantise_seconds(products: list[Product], work: Work, gpu: Gpu, direction: int) -> float:
    """Codes read, and values written for the product; or the codes written transposed, for a backward one in FP8."""
    codes = sum(product.experts * product.inputs * product.outputs for product in products if product.fp8)
    if multiplies_fp8(work, gpu):
        return codes * 2 * direction / _bandwidth(gpu)
    return codes * (1 + work.value_bytes) / _bandwidth(gpu)


def _bandwidth(gpu: Gpu) -> float:
    return gpu.bandwidth_gbs * 1e9
