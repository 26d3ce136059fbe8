"""Which optimizers are there, which arguments does each take, and why is another one refused?

An optimizer is here when its update is elementwise and its state is a number or shaped like the parameter: it then does
to the shards of a parameter what it does to the whole, and its state can be saved and resumed on any number of
processes. tests/train/test_optimizers.py proves that for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from shardtune.config.fields import Float, Section
from shardtune.config.keyword_args import KeywordProblem, check_keywords
from shardtune.config.suggestions import nearest


class NoArguments(Section):
    """adamax."""


class Adam(Section):
    amsgrad: bool = Field(default=False, description="Divide by the largest mean of squared gradients so far.")


class NAdam(Section):
    momentum_decay: Float = Field(default=4e-3, ge=0, description="Decay of the momentum schedule.")
    decoupled_weight_decay: bool = Field(default=False, description="Weight decay as AdamW's.")


class RAdam(Section):
    decoupled_weight_decay: bool = Field(default=False, description="Weight decay as AdamW's.")


class SGD(Section):
    momentum: Float = Field(default=0.0, ge=0, lt=1, description="Share of the last update that is kept.")
    dampening: Float = Field(default=0.0, ge=0, le=1, description="Share of the gradient kept out of the momentum.")
    nesterov: bool = Field(default=False, description="Nesterov momentum.")


class RMSprop(Section):
    alpha: Float = Field(default=0.99, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: Float = Field(default=1e-8, gt=0, description="Added to the denominator.")
    momentum: Float = Field(default=0.0, ge=0, lt=1, description="Share of the last update that is kept.")
    centered: bool = Field(default=False, description="Divide by an estimate of the gradient's variance.")


class Adagrad(Section):
    lr_decay: Float = Field(default=0.0, ge=0, description="The learning rate is divided by 1 + step × lr_decay.")
    initial_accumulator_value: Float = Field(default=0.0, ge=0, description="Start of the sum of squared gradients.")
    eps: Float = Field(default=1e-10, gt=0, description="Added to the denominator.")


class Adadelta(Section):
    rho: Float = Field(default=0.9, ge=0, le=1, description="Decay of the running mean of squared gradients.")
    eps: Float = Field(default=1e-6, gt=0, description="Added under the roots; sets the size of the first updates.")


@dataclass(frozen=True)
class OptimizerSpec:
    torch_class: str  # its name in torch.optim
    arguments: type[Section]
    uses_adam_settings: bool = False  # adam_beta1, adam_beta2, adam_epsilon
    decoupled_weight_decay: bool = False  # else it is L2: weight_decay × parameter is added to the gradient


OPTIMIZERS = {
    "adamw_torch": OptimizerSpec("AdamW", Adam, uses_adam_settings=True, decoupled_weight_decay=True),
    "adamw_torch_fused": OptimizerSpec("AdamW", Adam, uses_adam_settings=True, decoupled_weight_decay=True),
    "adam": OptimizerSpec("Adam", Adam, uses_adam_settings=True),
    "adamax": OptimizerSpec("Adamax", NoArguments, uses_adam_settings=True),
    "nadam": OptimizerSpec("NAdam", NAdam, uses_adam_settings=True),
    "radam": OptimizerSpec("RAdam", RAdam, uses_adam_settings=True),
    "sgd": OptimizerSpec("SGD", SGD),
    "rmsprop": OptimizerSpec("RMSprop", RMSprop),
    "adagrad": OptimizerSpec("Adagrad", Adagrad),
    "adadelta": OptimizerSpec("Adadelta", Adadelta),
}

_EXTRA_STATE = ("amsgrad", "momentum", "centered")  # arguments that keep one more number per parameter


def state_tensors(name: str, arguments: Mapping[str, Any]) -> int:
    """Numbers that an optimizer keeps for each parameter."""
    own = {"sgd": 0, "rmsprop": 1, "adagrad": 1}.get(name, 2)
    return own + sum(bool(arguments.get(key)) for key in _EXTRA_STATE)


_ADAMW = "use adamw_torch"
_QUANTISED = (
    "its state is kept in quantised blocks that do not follow the shards of a parameter, and there is little to save: "
    "the AdamW state of a LoRA is megabytes",
    _ADAMW,
)
_PAGED = (
    "it pages its state between GPU and host with bitsandbytes, which does not handle sharded tensors, and there is "
    "little to save: the AdamW state of a LoRA is megabytes",
    _ADAMW,
)
_LOW_RANK = ("it projects gradients of whole matrices, which a LoRA already does by its rank", _ADAMW)
_DURING_BACKWARD = (
    "it updates weights during the backward pass, before gradients are accumulated and clipped",
    "use sgd, which keeps no state either",
)
_SCHEDULE_FREE = ("it trains other weights than it evaluates and saves, and switches between them", _ADAMW)
_WHOLE_TENSOR = "its update needs the whole tensor; computed per shard it would differ"
_ANOTHER_DEVICE = ("it is made for another kind of device", _ADAMW)
_ANOTHER_PACKAGE = ("it is from another package, and not tested on sharded tensors", _ADAMW)

REFUSED_OPTIMIZERS: dict[str, tuple[str, str]] = {  # name: (why, what to use)
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"), _QUANTISED),
    **dict.fromkeys(("ademamix_8bit", "lion_8bit", "rmsprop_bnb_8bit"), _QUANTISED),
    **dict.fromkeys(("paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit"), _PAGED),
    **dict.fromkeys(("paged_lion_8bit", "paged_lion_32bit", "paged_adamw"), _PAGED),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), (_ANOTHER_PACKAGE[0], "use rmsprop")),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"), _LOW_RANK),
    **dict.fromkeys(("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _LOW_RANK),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo"), _DURING_BACKWARD),
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), _SCHEDULE_FREE),
    **dict.fromkeys(("adafactor", "stable_adamw"), (_WHOLE_TENSOR, _ADAMW)),
    **dict.fromkeys(("muon", "lamb", "lars", "shampoo", "soap"), (_WHOLE_TENSOR, _ADAMW)),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), _ANOTHER_DEVICE),
    **dict.fromkeys(("ademamix", "grokadamw", "lion", "lion_32bit", "sophia", "adamw_anyprecision"), _ANOTHER_PACKAGE),
    **dict.fromkeys(("adamw_hf", "adamw_apex_fused", "adamw"), ("it is an old name of AdamW", _ADAMW)),
    "lbfgs": ("it evaluates the loss several times in a step and looks at all parameters together", _ADAMW),
    "sparse_adam": ("it is for sparse gradients; those of adapters are dense", _ADAMW),
    "asgd": ("the average of the weights that it computes would be used by nothing", "use sgd"),
    "rprop": ("it ignores the learning-rate schedule, and its step sizes are made for full batches", _ADAMW),
}

_RESERVED = {  # arguments of torch's classes that have a setting of their own, or none
    "lr": "set train.learning_rate",
    "weight_decay": "set train.weight_decay",
    "fused": "remove it: AdamW is fused on a GPU, and with optim: adamw_torch_fused everywhere",
    "foreach": "remove it: torch chooses the implementation",
    "capturable": "remove it: a step is not captured in a CUDA graph",
    "differentiable": "remove it: nothing differentiates through the optimizer",
    "maximize": "remove it: the loss is minimised",
    "params": "remove it: what trains is set in the section lora",
}
_ADAM_SETTINGS = {"betas": "set train.adam_beta1 and train.adam_beta2", "eps": "set train.adam_epsilon"}


def check_optimizer(name: str) -> tuple[str, str] | None:
    """(what, fix) where `train.optim` is not one of OPTIMIZERS."""
    if name in OPTIMIZERS:
        return None
    if name in REFUSED_OPTIMIZERS:
        why, fix = REFUSED_OPTIMIZERS[name]
        return f"'{name}' is not supported: {why}", fix
    close = "adamw_torch" if name.lower() == "adamw" else nearest(name, OPTIMIZERS, cutoff=0.5)
    return f"'{name}' is not an optimizer (there are {', '.join(OPTIMIZERS)})", (
        f"did you mean `{close}`?" if close else _ADAMW
    )


def check_optim_args(name: str, args: Mapping[str, Any]) -> list[KeywordProblem]:
    """What is wrong with `train.optim_args` of the optimizer `name`: (key, what, fix) each."""
    spec = OPTIMIZERS[name]
    reserved = {**_RESERVED, **(_ADAM_SETTINGS if spec.uses_adam_settings else {})}
    problems = [(key, f"'{key}' cannot be set in optim_args", reserved[key]) for key in args if key in reserved]
    problems += check_keywords(spec.arguments, {key: args[key] for key in args if key not in reserved}, name)
    if not problems and spec.arguments is SGD:
        problems += _check_momentum(SGD.model_validate(dict(args)))
    return problems


def _check_momentum(sgd: SGD) -> list[KeywordProblem]:
    if sgd.nesterov and (sgd.momentum == 0 or sgd.dampening > 0):
        return [
            ("nesterov", "Nesterov momentum needs a momentum and no dampening", "set momentum: 0.9 and no dampening")
        ]
    if sgd.dampening > 0 and sgd.momentum == 0:
        return [("dampening", "dampening has no effect without momentum", "set momentum, or remove dampening")]
    return []
