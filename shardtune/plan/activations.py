"""What does a decoder layer keep for its backward pass, and what does it need while it runs? Looked up, for any size.

`activations.json` holds what `train.memory.activation_table` read off the graphs of each family's layer: sums of
products of a layer's dimensions, for each token of a micro-batch or for the layer. A family that is not there is
estimated by the shapes of its weights, upwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shardtune.plan.facts import EXPERTS_PER_TOKEN, Shape

if TYPE_CHECKING:
    from shardtune.plan.facts import Facts, LayerKind
    from shardtune.plan.work import Work

TABLE = Path(__file__).with_name("activations.json")
KnownBy = Literal["table", "traced", "estimated"]
Mode = Literal["none", "selective", "evaluation"]  # full checkpointing computes again as `none` does
Dimensions = Mapping[str, int]
T = TypeVar("T")
_OUTPUTS = ("o_proj.weight", "dense.weight", "out_proj.weight")  # of attention, by the end of its name
_DOWN = ("mlp.down_proj.weight", "mlp.fc2.weight", "feed_forward.down_proj.weight", "feed_forward.w2.weight")
# Of the values that go into and come out of a layer's products, what it keeps at most; uncompiled.
_ESTIMATED, _ESTIMATED_EAGER = 1.15, 1.6


@dataclass(frozen=True)
class Bytes:
    """A sum of terms `bytes × product of dimensions`, for each token and for the layer as a whole.

    Written `12 hidden + 4 heads*head_dim | 2 experts*hidden`: behind the bar what does not grow with tokens.
    """

    of_token: Mapping[str, float]
    of_layer: Mapping[str, float]

    def count(self, dimensions: Dimensions, tokens: int) -> int:
        return int(tokens * _sum(self.of_token, dimensions) + _sum(self.of_layer, dimensions))

    @staticmethod
    def parse(text: str) -> Bytes:
        of_token, _, of_layer = text.partition("|")
        return Bytes(*(_terms(part) for part in (of_token, of_layer)))

    def __str__(self) -> str:
        parts = [" + ".join(f"{n:g} {name}" for name, n in terms.items()) for terms in (self.of_token, self.of_layer)]
        return f"{parts[0]} | {parts[1]}" if parts[1] else parts[0]


def _terms(text: str) -> dict[str, float]:
    return {name: float(number) for number, name in (term.split() for term in text.split("+") if term.strip())}


def _sum(terms: Mapping[str, float], dimensions: Dimensions) -> float:
    return sum(number * _product(name, dimensions) for name, number in terms.items())


def _product(name: str, dimensions: Dimensions) -> int:
    return 1 if name == "1" else prod(dimensions[factor] for factor in name.split("*"))


@dataclass(frozen=True)
class Moment:
    """A kernel runs: what is alive, and the numel of the frozen weight that it multiplies with.

    Written `12 hidden @ 2 hidden*intermediate`.
    """

    alive: Bytes
    weight: str = ""

    @staticmethod
    def parse(text: str) -> Moment:
        alive, _, weight = text.partition("@")
        return Moment(Bytes.parse(alive), weight.strip())

    def __str__(self) -> str:
        return f"{self.alive} @ {self.weight}" if self.weight else str(self.alive)


@dataclass(frozen=True)
class LayerActivations:
    """Of one layer: what it keeps, with its input, and what is alive in moments that can be the peak of its passes."""

    kept: Bytes
    moments: tuple[Moment, ...]

    @staticmethod
    def parse(entry: Mapping[str, Any]) -> LayerActivations:
        return LayerActivations(Bytes.parse(entry["kept"]), tuple(map(Moment.parse, entry["moments"])))

    def dimensions(self) -> set[str]:
        """Those it is computed from."""
        counted = (self.kept, *(one.alive for one in self.moments))
        terms = {term for one in counted for part in (one.of_token, one.of_layer) for term in part}
        return {name for term in terms for name in term.split("*")} - {"1"}

    def entry(self) -> dict[str, Any]:
        return {"kept": str(self.kept), "moments": [str(one) for one in self.moments]}


def dimensions(model: Mapping[str, Any], kind: LayerKind) -> dict[str, int]:
    """Of a layer, by the names that the table uses, from the shapes of its weights and its config."""
    shapes, hidden, heads = kind.parameters, int(model["hidden_size"]), int(model.get("num_attention_heads") or 1)
    found = {"hidden": hidden, "heads": heads}
    latent = _rows(shapes, "kv_a_proj_with_mqa.weight")
    if latent:  # MLA
        nope, rope, value = (int(model[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        found |= {"q_rank": _rows(shapes, "q_a_proj.weight"), "kv_rank": latent - rope, "kv_rank_and_rope": latent}
        found |= {"rope": rope, "nope": nope, "value_dim": value, "qk_dim": nope + rope, "nope_and_value": nope + value}
    else:
        head_dim = int(model.get("head_dim") or _columns(shapes, _OUTPUTS) // heads or hidden // heads)
        kv = _rows(shapes, "k_proj.weight") // head_dim or int(model.get("num_key_value_heads") or heads)
        found |= {"head_dim": head_dim, "kv_heads": kv, "qkv_heads": heads + 2 * kv}
    found["intermediate"] = _columns(shapes, _DOWN)
    experts = _of_experts(kind, shapes)
    if experts:
        number, *_, width = next(
            (s for n, s in experts.items() if n.endswith("down_proj")), next(iter(experts.values()))
        )
        routed = next((int(model[name]) for name in EXPERTS_PER_TOKEN if model.get(name)), 1)
        shared = _columns({name: s for name, s in shapes.items() if "shared" in name}, ("down_proj.weight",))
        found |= {"experts": number, "expert_width": width, "top_k": routed, "shared_width": shared}
    of_experts = _of_experts(kind, kind.adapted)
    of_others = [rank for site, rank in kind.adapted.items() if site not in of_experts]
    found["rank"] = -(-sum(of_others) // len(of_others)) if of_others else 0
    found["expert_rank"] = -(-max(of_experts.values(), default=0) // 8) * 8  # filled up for grouped products
    return found


def _rows(shapes: Mapping[str, Shape], end: str) -> int:
    return next((shape[0] for name, shape in shapes.items() if name.endswith(end)), 0)


def _columns(shapes: Mapping[str, Shape], ends: tuple[str, ...]) -> int:
    return next((shape[1] for name, shape in shapes.items() if name.endswith(ends) and len(shape) == 2), 0)


def _of_experts(kind: LayerKind, by_name: Mapping[str, T]) -> dict[str, T]:
    """Of what goes by names of parameters or of their modules, that of routed experts."""
    return {name: value for name, value in by_name.items() if len(_shape(kind, name)) == 3}


def _shape(kind: LayerKind, site: str) -> Shape:
    return kind.parameters.get(site) or kind.parameters.get(f"{site}.weight") or ()


def layer_activations(facts: Facts, kind: LayerKind, work: Work, mode: Mode) -> tuple[LayerActivations, KnownBy]:
    """Of a layer of this kind."""
    sparse = bool(_of_experts(kind, kind.parameters))
    entry = families().get(facts.model_type, {}).get("experts" if sparse else "dense", {})
    key = setting_key(
        adapted=_adapted(kind), compiled=work.compiled, fused_lora=work.fused_lora, packed=work.packed, mode=mode,
        dropout=work.dropout and mode != "evaluation",
    )  # fmt: skip
    if key in entry and (work.fused_experts or not sparse):
        found = stored_layer(entry[key])
        if found.dimensions() <= dimensions(facts.model, kind).keys():  # not where this model is built in another way
            return found, "table"
    return _estimate(facts, kind, work), "estimated"


def setting_key(*, adapted: str, compiled: bool, fused_lora: bool, packed: bool, mode: Mode, dropout: bool) -> str:
    """Under which name a setting stands in the table. PEFT's own forward goes with attention over rows alone."""
    words = [adapted, "compiled" if compiled else "uncompiled", "fused" if fused_lora else "peft"]
    words += ["packed" if packed and fused_lora else "rows", mode, *(["dropout"] if dropout else [])]
    return " ".join(words)


def _adapted(kind: LayerKind) -> str:
    """The tabled set of adapters that has all of these."""
    if _of_experts(kind, kind.adapted):
        return "experts"
    return "attention" if all("attn" in site or "attention" in site for site in kind.adapted) else "linear"


def final_norm(facts: Facts) -> LayerActivations:
    """Of the norm behind the layers, which runs uncompiled."""
    known = families()
    return stored_layer(known.get(facts.model_type, known["llama"])["norm"])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


def families() -> dict[str, Any]:
    families: dict[str, Any] = _content()["families"]
    return families


@cache
def stored_layer(name: str) -> LayerActivations:
    return LayerActivations.parse(_content()["layers"][name])


def _estimate(facts: Facts, kind: LayerKind, work: Work) -> LayerActivations:
    """By what goes into and comes out of the products: more than any family in the table keeps (a test compares)."""
    routed = facts.experts_per_token
    matrices = [shape for shape in kind.parameters.values() if len(shape) > 1]
    width = sum(sum(shape[-2:]) * (routed if len(shape) == 3 else 1) for shape in matrices)
    share = _ESTIMATED if work.compiled else _ESTIMATED_EAGER
    if work.dropout:  # what each adapter sees is another tensor
        width += sum(_shape(kind, site)[-1] for site in kind.adapted if _shape(kind, site))
    if not work.compiled and facts.own_attention == "eager":  # scores and probabilities, in float32 and as values
        heads = int(facts.model.get("num_attention_heads") or 1)
        width += heads * min(work.length, kind.window or work.length) * 4
    largest = max((sum(s[-2:]) * (routed if len(s) == 3 else 1) for s in matrices), default=0)
    weight = max((prod(shape) for shape in matrices), default=0)
    peak = Moment(Bytes({"1": 2 * (width * share + 2 * largest)}, {}), f"{weight} 1")
    return LayerActivations(Bytes({"1": 2 * width * share}, {}), (peak,))


def numel(weight: str, sizes: Dimensions) -> int:
    """Of a moment's weight."""
    return int(_sum(_terms(weight), sizes))
