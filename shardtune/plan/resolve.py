"""What does every `auto` come to, and why? One pure function of the config and the facts; nothing is changed by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardtune.errors import UserInputError
from shardtune.kernels.attention_names import VARLEN, WHOLE_ROWS
from shardtune.model.families.registry import known_decoder_layers
from shardtune.plan import choose
from shardtune.plan import resolve_sharding as sharding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Facts

Choice = tuple[str, object, str]  # a setting's path, its value, why
# From here on padding costs less than variable-length attention does (measured: 8 % of a 7B model's step).
NEARLY_FULL = 0.95
# Attention codes that take the documents' bounds instead of a mask.
FLAT_ATTENTION = (VARLEN, "flash_attention_2", "flash_attention_3")
_OURS = (VARLEN, WHOLE_ROWS)
_PACKING, _ATTENTION, _LAYER_CLASS = (
    "train.packing",
    "model.attn_implementation",
    "parallel.transformer_layer_cls_to_wrap",
)


@dataclass(frozen=True)
class Notice:
    """What a user should know about a choice; `about` sorts it in the event log."""

    about: str
    text: str


@dataclass(frozen=True)
class ResolvedRun:
    """A config in which nothing is left open.

    Attributes:
        settings: The values; their origins hold the reason of each choice.
        notices: What to tell the user about the choices.
    """

    settings: ResolvedConfig
    notices: tuple[Notice, ...]

    @property
    def config(self) -> RunConfig:
        return self.settings.config

    def reason(self, path: str) -> str | None:
        """Why `auto` came to the value of a setting; None = the setting was given."""
        origin = self.settings.origins.get(path)
        return origin.where if origin is not None and origin.source == "auto" else None


def resolve(asked: ResolvedConfig, facts: Facts) -> ResolvedRun:
    """Every `auto` replaced by a value with its reason.

    Raises:
        UserInputError: something was asked for that this machine or model cannot do.
    """
    settings = asked
    for step in _STEPS:
        for choice in step(settings, facts):
            settings = settings.with_auto(*choice)
    return ResolvedRun(settings, tuple(_notices(asked, settings.config, facts)))


def _place(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    parallel, machine = resolved.config.parallel, facts.machine
    if parallel.device == "auto":
        found = "a" if machine.device == "cuda" else "no"
        yield "parallel.device", machine.device, f"torch sees {found} CUDA device"
    if parallel.nproc == "auto":
        yield "parallel.nproc", machine.processes_here, "processes on this machine"


def _evaluation(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    if resolved.config.train.eval_strategy == "auto":
        given = resolved.config.data.val_split is not None
        yield "train.eval_strategy", "steps" if given else "no", f"data.val_split is {'given' if given else 'null'}"


def _dtype(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """What weights are held in, and what products are computed in."""
    config, held = resolved.config, facts.dtype
    if config.model.torch_dtype == "auto":
        yield "model.torch_dtype", held, "the checkpoint's own dtype, or bfloat16 where that is float16"
    if config.train.bf16 == "auto":
        yield "train.bf16", held == "bfloat16", f"the model is held in {held}"
    if config.lora.bias != "none" and _adapters_are_wider(config, facts):
        raise UserInputError(
            f"lora.bias is {config.lora.bias}, but train.bf16 is false with weights in bfloat16.",
            why="What trains is float32, and a bias is added to a product of its weight's dtype.",
            fix="Set train.bf16: true, or model.torch_dtype: float32.",
        )


def _layer_class(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """A decoder layer's class that was copied from another architecture's file means this model's decoder layer."""
    own, names = facts.layer_class, _layer_classes(resolved)
    if own is None or own not in _module_classes(facts):
        return
    copied = _copied(names, facts)
    unknown = [name for name in names if name not in facts.module_classes and name not in copied]
    if facts.module_classes and unknown:
        raise UserInputError(
            f"{_where(resolved)}: no module of class {', '.join(unknown)} in the model.",
            why=f"The decoder layer of {facts.model_class} is {own}.",
            fix=f"Write {own} there, or leave the key out: it is detected.",
        )
    if copied:
        meant = list(dict.fromkeys(own if name in copied else name for name in names))
        why = f"{', '.join(copied)}: a decoder layer of another architecture, not in {facts.model_class}"
        yield _LAYER_CLASS, meant[0] if len(meant) == 1 else meant, why


def _layer_classes(resolved: ResolvedConfig) -> list[str]:
    asked = resolved.config.parallel.transformer_layer_cls_to_wrap or []
    return [asked] if isinstance(asked, str) else asked


def _copied(names: list[str], facts: Facts) -> list[str]:
    """Decoder layers of other architectures."""
    return [name for name in names if name not in _module_classes(facts) and name in known_decoder_layers()]


def _module_classes(facts: Facts) -> Collection[str | None]:
    """Of a model that was not built, only the decoder layer's class is known."""
    return facts.module_classes or {facts.layer_class}


def _where(resolved: ResolvedConfig) -> str:
    return resolved.origins[_LAYER_CLASS].where or _LAYER_CLASS


def _router_loss(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """Null becomes the model's own weight; it stays where the model has no such loss."""
    if resolved.config.train.router_aux_loss_coef is None and facts.router_coefficient:
        yield "train.router_aux_loss_coef", facts.router_coefficient, "as in the model's config"


def _fp8_compute(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    held, asked = resolved.config.model.base_precision, resolved.config.train.fp8_compute
    if asked is True and held != "fp8":
        raise UserInputError(
            "train.fp8_compute is true, but no weight is held in FP8.",
            why=f"model.base_precision is {held}, and what is multiplied as float8 is the frozen base.",
            fix="Set model.base_precision: fp8, or train.fp8_compute: auto or false.",
        )
    if asked == "auto":
        why = "it rounds activations to float8, so it is opt-in" if held == "fp8" else f"the base is {held}"
        yield "train.fp8_compute", False, why


def _kernels(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """Which fused code runs, and where it does not, why."""
    train = resolved.config.train
    wider = None
    if _adapters_are_wider(resolved.config, facts):
        wider = "with train.bf16 false, float32 adapters meet activations in bfloat16"
    _refuse_impossible(resolved, facts, wider)
    on_gpu = None if _half_on_gpu(resolved, facts) else "compiling pays off only on a GPU in half precision"
    for key, obstacle in (
        ("fused_lora", wider),
        ("fused_experts", facts.missing.get("fused_experts") if facts.has_experts else "no routed experts"),
        ("fused_loss", facts.loss_obstacle),
        ("compile", on_gpu or facts.missing.get("compile")),
    ):
        if getattr(train, key) == "auto":
            why = "train.kernels is eager" if train.kernels == "eager" else obstacle
            yield f"train.{key}", why is None, why or "supported by this machine and model"


def _refuse_impossible(resolved: ResolvedConfig, facts: Facts, wider: str | None) -> None:
    """What is asked for by name, and would not compute what the model means, or do nothing."""
    for key, asked, why, instead in (
        ("fused_lora", True, wider, "auto or false"),
        ("fused_loss", True, facts.loss_obstacle, "auto or false"),
        ("fused_experts", True, facts.unsupported.get("fused_experts"), "auto or false"),
        ("gradient_checkpointing", "selective", facts.missing.get("selective"), "full"),
    ):
        if getattr(resolved.config.train, key) == asked and why is not None:
            raise UserInputError(
                f"train.{key} is {str(asked).lower()}, which {facts.model_class} cannot have.",
                why=why[0].upper() + why[1:] + ".",
                fix=f"Set train.{key}: {instead}.",
            )


def _fastest(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """Precision, sharding, recomputation, offloading and batch: they share the memory."""
    return choose.choices(resolved.config, facts)


def _packing(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """Whether rows are packed, which must be known before the attention code is."""
    asked, attention = resolved.config.train.packing, resolved.config.model.attn_implementation
    obstacle = facts.missing.get("packing")
    if asked is True and obstacle is not None:
        raise UserInputError(
            f"{_PACKING} is true, but {facts.model_class} is not known to keep the documents of a row apart.",
            why=obstacle[0].upper() + obstacle[1:] + ".",
            fix=f"Set {_PACKING}: auto or false: one document per row, padded.",
        )
    if asked != "auto":
        return
    may_be_full = _half_on_gpu(resolved, facts) and attention in ("auto", "sdpa")
    if obstacle is not None:
        yield _PACKING, False, obstacle
    elif attention == WHOLE_ROWS:
        yield _PACKING, False, f"{_ATTENTION} is {attention}"
    elif may_be_full and facts.fill_share() >= NEARLY_FULL:
        yield _PACKING, False, "rows nearly fill data.max_length, and attention is faster unpacked"
    else:
        yield _PACKING, True, "attention keeps packed documents apart"


def _attention(resolved: ResolvedConfig, facts: Facts) -> Iterator[Choice]:
    """The attention code that fits how rows are laid out."""
    asked, packed = resolved.config.model.attn_implementation, resolved.config.train.packing is True
    if asked not in ("auto", *_OURS):
        return
    name = VARLEN if packed else WHOLE_ROWS
    obstacle = _why_not_ours(resolved, facts)
    if asked == "auto":
        if obstacle is None:
            yield _ATTENTION, name, f"{'packed' if packed else 'unpacked'} rows on a GPU in half precision"
        elif facts.own_attention == "sdpa":
            yield _ATTENTION, "sdpa", obstacle
        else:
            yield _ATTENTION, facts.own_attention, f"{facts.model_class} has no sdpa attention"
    elif asked != name or obstacle is not None:
        raise UserInputError(
            f"{_ATTENTION} is {asked}, which this run cannot use.",
            why=f"{VARLEN} is for packed rows and {WHOLE_ROWS} for others; both need a GPU and half "
            f"precision. Here {_PACKING} is {str(packed).lower()}.",
            fix=f"Set {_ATTENTION}: auto.",
        )


def _why_not_ours(resolved: ResolvedConfig, facts: Facts) -> str | None:
    """Why attention without a mask of transformers cannot be had; None = it can."""
    config = resolved.config
    if config.train.kernels == "eager" and config.model.attn_implementation == "auto":
        return "train.kernels is eager"
    if not _half_on_gpu(resolved, facts):
        return "torch's fused attention"
    if config.train.packing:
        return "attention has dropout" if facts.attention_dropout else facts.missing.get("varlen")
    if not facts.full_attention:
        return "not every layer has full causal attention"
    return facts.missing.get("whole_rows")


def _half_on_gpu(resolved: ResolvedConfig, facts: Facts) -> bool:
    return facts.machine.device == "cuda" and (resolved.config.train.bf16 is True or facts.dtype == "bfloat16")


def _adapters_are_wider(config: RunConfig, facts: Facts) -> bool:
    """Whether float32 adapters meet bfloat16 activations: nothing casts them as `train.bf16` would."""
    return facts.dtype == "bfloat16" and not config.train.bf16


def _notices(asked: ResolvedConfig, config: RunConfig, facts: Facts) -> Iterator[Notice]:
    if facts.machine.lacks_bf16 and facts.dtype == "bfloat16":
        text = "model.torch_dtype is bfloat16, but this CPU has no bfloat16 units: expect steps many times slower. "
        yield Notice("config", text + "Set model.torch_dtype: float32.")
    if facts.layer_class in _module_classes(facts) and (copied := _copied(_layer_classes(asked), facts)):
        meant = f"{facts.layer_class}, the decoder layer of {facts.model_class}"
        yield Notice("sharding", f"{_where(asked)}: {', '.join(copied)} is read as {meant}.")
    if asked.config.guards.replica_check_steps and (config.parallel.shard == "full" or facts.machine.world_size == 1):
        yield Notice("sharding", "guards.replica_check_steps has no effect: there is one replica of the base.")
    kept = asked.config.parallel.reshard_after_forward
    if kept != "auto" and config.parallel.shard == "replicate" and facts.machine.world_size > 1:
        text = "every process holds the whole base, and nothing of it is gathered (parallel.shard: auto)."
        yield Notice("sharding", f"parallel.reshard_after_forward has no effect: {text}")
    if config.guards.memory_plan != "off" and (scarce := choose.warning(config, facts)) is not None:
        yield Notice("memory", scarce)
    if (hybrid := sharding.hybrid_notice(asked.config, facts)) is not None:
        yield Notice("sharding", hybrid)
    if facts.unused_router_loss is not None:
        yield Notice("loss", facts.unused_router_loss)


# What is chosen further down depends on what is chosen above it. Whether rows are packed is asked after everything that
# could be refused, because the data may have to be prepared for it.
_STEPS = (
    _place, _evaluation, _dtype, _layer_class, _router_loss, _kernels, sharding.choices, _fastest, _fp8_compute,
    _packing, _attention,
)  # fmt: skip
