"""Where does `plan/activations.json` come from? One layer of each family, traced at a size whose dimensions can be told
apart: every tensor's size is then a product of dimensions, and the same product holds for a model of any size.

    python -m shardtune.train.memory.activation_table [FAMILY ...]
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, get_args

import numpy
import torch
import transformers
from torch._dynamo.exc import BackendCompilerFailed
from transformers import AutoConfig

from shardtune.adapters.fused import use_fused_lora
from shardtune.adapters.lora import add_lora
from shardtune.adapters.ranks import rank_of
from shardtune.adapters.targets import resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError
from shardtune.model.experts import use_grouped_experts
from shardtune.model.families.generic import decoder_of
from shardtune.model.families.registry import family_for
from shardtune.model.model_outline import outline_of
from shardtune.plan import activations as plan
from shardtune.plan.facts import LayerKind
from shardtune.train.memory import layer_trace
from shardtune.train.memory.layer_trace import Kernels, LayerTrace, TensorSize

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

TOKENS = 10007
_DENSE = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3",
    "granite", "cohere2", "glm4",
)  # fmt: skip
_SPARSE = ("qwen3_moe", "qwen2_moe", "mixtral", "mistral4", "deepseek_v3", "glm4_moe")
_KINDS = dict.fromkeys(_SPARSE, ("dense", "experts")) | dict.fromkeys(("mixtral", "mistral4"), ("experts",))
# Ratios as in real models, and next to no common factors.
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 4445, "intermediate_size": 11003, "num_attention_heads": 35,
    "num_key_value_heads": 5, "head_dim": 136, "num_hidden_layers": 1, "max_position_embeddings": 1 << 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "sliding_window": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 1531, "n_shared_experts": 11, "shared_expert_intermediate_size": 16841,
    "num_experts_per_tok": 7, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 61),
}  # fmt: skip
_LATENT = {  # MLA has as many keys as queries
    "q_lora_rank": 1013, "kv_lora_rank": 541, "qk_nope_head_dim": 94, "qk_rope_head_dim": 58, "v_head_dim": 118,
    "num_key_value_heads": 35,
}  # fmt: skip
_RANK, _EXPERT_RANK = 19, 184
_LATENT_FAMILIES = ("mistral4", "deepseek_v3")
_MULTIPLIERS = (1, 2, 4, 8, 0.5, 0.25)
_SMALL = 64  # values per token that need no name


@dataclass(frozen=True)
class Setting:
    """What distinguishes two lines of the table of one family."""

    adapted: str
    compiled: bool
    fused_lora: bool
    packed: bool
    mode: plan.Mode
    dropout: bool

    @property
    def key(self) -> str:
        return plan.setting_key(**vars(self))


def settings(sparse: bool) -> Iterator[Setting]:
    """All that a run can come to: what is compiled has our operators, and PEFT's own forward no attention of ours."""
    kernels = [(True, True), (False, True), (False, False)]
    targets = ("attention", "linear", "experts") if sparse else ("attention", "linear")
    modes: tuple[plan.Mode, ...] = get_args(plan.Mode)
    for adapted, (compiled, fused), packed, mode, dropout in itertools.product(
        targets, kernels, (False, True), modes, (False, True)
    ):
        if (fused or not packed) and not (dropout and (adapted == "experts" or mode == "evaluation")):
            yield Setting(adapted, compiled, fused, packed, mode, dropout)


def config_of(model_type: str, sparse: bool, **changes: Any) -> Any:
    """A config of the family at the size that is traced."""
    sizes = dict(_SIZES)
    if sparse:
        sizes |= _EXPERTS
        if model_type == "mixtral":
            sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
    elif model_type in _SPARSE:
        sizes |= _EXPERTS | {"first_k_dense_replace": 1, "mlp_only_layers": [0]}
    if model_type in _LATENT_FAMILIES:
        sizes |= _LATENT
        del sizes["head_dim"]
    return AutoConfig.for_model(model_type, **sizes | changes)


def build(config: Any, setting: Setting) -> tuple[PreTrainedModel, nn.Module, LayerKind]:
    """A model of one layer on the meta device, adapted and fused as in a run; the layer, and what plan knows of it."""
    family = family_for(config.model_type)
    assert family is not None
    with torch.device("meta"):
        model = getattr(transformers, family.causal_lm[config.model_type])._from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    section = LoraSection(
        r=_RANK,
        expert_r=_EXPERT_RANK,
        lora_dropout=0.05 if setting.dropout else 0.0,
        target_modules=["attention"] if setting.adapted == "attention" else ["attention", "mlp"],
        experts=setting.adapted == "experts" or None,
    )
    outline = outline_of(model, family)
    (name,) = outline.layers
    layer = model.get_submodule(name)
    kind = LayerKind(
        count=1,
        parameters={below: tuple(p.shape) for below, p in layer.named_parameters()},
        quantised=frozenset(),
        adapted={site.below: rank_of(site, section) for site in resolve_targets(outline, section).sites.values()},
    )
    adapted, _, _ = add_lora(model, section, family)
    if setting.fused_lora:
        use_fused_lora(adapted)
    use_grouped_experts(adapted)
    return model, layer, kind


def trace(config: Any, setting: Setting, tokens: int = TOKENS) -> tuple[LayerTrace, dict[str, int]]:
    """The layer of a config, and its dimensions."""
    model, layer, kind = build(config, setting)
    kernels = Kernels(compiled=setting.compiled, packed=setting.packed, mode=setting.mode)
    sizes = plan.dimensions(config.to_dict(), kind)
    return layer_trace.trace_layer(model, layer, kernels, tokens), sizes


def named(found: LayerTrace, sizes: Mapping[str, int]) -> plan.LayerActivations:
    """A trace with products of dimensions in the place of sizes."""
    names = Names(sizes)
    return plan.LayerActivations(names.total(found.kept), prune(map(names.moment, found.moments)))


class Names:
    """Finds which product of dimensions a number is."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.products: dict[float, str] = {}
        known = {name: size for name, size in sizes.items() if size > 1}
        for count in range(4):
            for some in itertools.combinations(sorted(known), count):
                for multiplier in _MULTIPLIERS:
                    name = "*".join(some) or "1"
                    self.products.setdefault(prod(known[one] for one in some) * multiplier, f"{multiplier:g} {name}")

    def moment(self, moment: layer_trace.Moment) -> plan.Moment:
        weight = self._find(moment.weight) if moment.weight else ""
        return plan.Moment(self.total(moment.alive), weight)

    def total(self, tensors: Iterable[TensorSize]) -> plan.Bytes:
        of_token: Counter[str] = Counter()
        of_layer: Counter[str] = Counter()
        for tensor in tensors:
            per_token, rest = divmod(tensor.numel, TOKENS)
            if tensor.numel <= _SMALL:
                continue  # random states and the like
            number, _, name = self._find(tensor.numel if rest else per_token).partition(" ")
            (of_layer if rest else of_token)[name] += float(number) * tensor.itemsize  # type: ignore[assignment]
        return plan.Bytes(dict(sorted(of_token.items())), dict(sorted(of_layer.items())))

    def _find(self, number: int) -> str:
        if number in self.products:
            return self.products[number]
        if number <= _SMALL:
            return f"{number} 1"
        raise ValueError(f"{number} is no product of the layer's dimensions.")


def prune(moments: Iterable[plan.Moment]) -> tuple[plan.Moment, ...]:
    """The fewest that give the peak to a percent, for layers of any shape, in bf16 or in float8."""
    unique = list({str(one): one for one in moments}.values())
    parts = [
        {("token", *t): n for t, n in _items(one.alive.of_token)}
        | {("layer", *t): n for t, n in _items(one.alive.of_layer)}
        for one in unique
    ]
    terms = sorted({term for part in parts for term in part})
    counted = numpy.array([[part.get(term, 0.0) for term in terms] for part in parts])
    draw, peaks = random.Random(0), []
    for _ in range(400):
        sizes, tokens, per_weight = _sizes(draw), 2 ** draw.uniform(9, 18), draw.choice((0, 1, 2))
        values = [(tokens if where == "token" else 1) * prod(sizes[one] for one in names) for where, *names in terms]
        weights = numpy.array([per_weight * plan.numel(one.weight, sizes) if per_weight else 0 for one in unique])
        peaks.append(counted @ numpy.array(values) + weights)
    covered = numpy.array(peaks) >= 0.99 * numpy.max(peaks, axis=1, keepdims=True)  # (samples, moments)
    chosen: list[int] = []
    while len(covered):
        chosen.append(int(covered.sum(axis=0).argmax()))
        covered = covered[~covered[:, chosen[-1]]]
    return tuple(unique[place] for place in sorted(chosen))


def _items(terms: Mapping[str, float]) -> Iterator[tuple[list[str], float]]:
    for name, number in terms.items():
        yield [] if name == "1" else name.split("*"), number


def _sizes(draw: random.Random) -> dict[str, int]:
    hidden = draw.choice((576, 1024, 2048, 4096, 8192))
    head_dim, group = draw.choice((64, 128, 256)), draw.choice((1, 4, 8))
    heads = max(group, hidden * draw.choice((1, 1, 2)) // head_dim)
    nope, rope, value = draw.choice(((64, 64, 128), (128, 64, 128)))
    width = hidden * draw.choice((1, 2, 3)) // 4
    kv_rank = draw.choice((256, 512))
    return {
        "hidden": hidden, "heads": heads, "head_dim": head_dim, "kv_heads": heads // group,
        "qkv_heads": heads + 2 * heads // group, "intermediate": int(hidden * draw.choice((2.5, 3.5, 4, 6))),
        "rank": draw.choice((8, 16, 64)), "expert_rank": draw.choice((8, 16)),
        "experts": draw.choice((8, 64, 128, 256)), "top_k": draw.choice((2, 4, 8)), "expert_width": width,
        "shared_width": width * draw.choice((1, 2)),
        "q_rank": draw.choice((1024, 1536)), "kv_rank": kv_rank, "rope": rope, "nope": nope, "value_dim": value,
        "qk_dim": nope + rope, "kv_rank_and_rope": kv_rank + rope, "nope_and_value": nope + value,
    }  # fmt: skip


def final_norm(config: Any) -> plan.LayerActivations:
    setting = Setting("attention", compiled=False, fused_lora=True, packed=False, mode="none", dropout=False)
    model, _, kind = build(config, setting)
    norm = decoder_of(model).get_submodule("norm")
    hidden = torch.empty(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = layer_trace.trace_eager(norm, lambda: norm(hidden * 1))
    return named(found, plan.dimensions(config.to_dict(), kind))


def family_table(model_type: str, layers: dict[str, Any]) -> dict[str, Any]:
    """The lines of one family; what they say goes into `layers`, each text once."""
    table: dict[str, Any] = {"norm": _put(layers, final_norm(config_of(model_type, model_type in _SPARSE)))}
    for kind in _KINDS.get(model_type, ("dense",)):
        lines = table[kind] = {}
        for setting in settings(kind == "experts"):
            if (found := try_trace(config_of(model_type, kind == "experts"), setting)) is not None:
                lines[setting.key] = _put(layers, found)
    return table


def try_trace(config: Any, setting: Setting) -> plan.LayerActivations | None:
    """None where the family does not have this setting: it is refused, or attention of ours does not compute it."""
    try:
        return named(*trace(config, setting))
    except (UserInputError, BackendCompilerFailed, ValueError) as error:
        print(f"{config.model_type}, {setting.key}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _put(layers: dict[str, Any], found: plan.LayerActivations) -> str:
    entry = found.entry()
    name = next((name for name, other in layers.items() if other == entry), None) or str(len(layers) + 1)
    layers[name] = entry
    return name


def main(wanted: list[str]) -> None:
    """Trace these families, or all; of the others, what is there stays."""
    before = json.loads(plan.TABLE.read_text(encoding="utf-8")) if wanted else {"families": {}}
    layers: dict[str, Any] = {}
    families = {}
    for model_type in (*_DENSE, *_SPARSE):
        if wanted and model_type not in wanted:
            families[model_type] = _copied(before["families"][model_type], before["layers"], layers)
            continue
        print(model_type, file=sys.stderr)
        families[model_type] = family_table(model_type, layers)
    plan.TABLE.write_text(json.dumps({"families": families, "layers": layers}, indent=1) + "\n", encoding="utf-8")


def _copied(table: dict[str, Any], old: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    def put(name: str) -> str:
        return _put(layers, plan.LayerActivations.parse(old[name]))

    return {
        kind: put(lines) if isinstance(lines, str) else {key: put(name) for key, name in lines.items()}
        for kind, lines in table.items()
    }


if __name__ == "__main__":
    main(sys.argv[1:])
