"""What can a server not do with an adapter? Checks before anything is written: what it would skip is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import ParamWrapper

from shardtune.adapters.weight_changes import Dora, LowRank, Replaced, Rows, WeightChange
from shardtune.errors import UserInputError
from shardtune.export.request import ExportRequest
from shardtune.export.served_factors import GATE_UP, LAYER
from shardtune.export.served_models import SERVERS, UNKNOWN, ServedModel, Server
from shardtune.model.experts import WEIGHTS, why_not_grouped
from shardtune.model.locate import looks_local

if TYPE_CHECKING:
    from torch import nn

    from shardtune.model.meta_model import MetaModel

MERGE = "Export merged weights, which every server loads: --to merged."
_ALONE = "SGLang computes it together with q_a_proj, which this model does not have."


def check_wrapper(
    request: ExportRequest, server: Server, model: ServedModel, meta_model: MetaModel, folder: Path
) -> None:
    wrapper, kind = meta_model.wrapper, meta_model.model.config.model_type
    if wrapper is None and not model.text_alone:
        raise UserInputError(
            f"--to {request.target}: {server.title} has no class for a {kind} text model alone.",
            why=f"It serves it inside its vision+text model ({', '.join(model.wrappers)}).",
            fix="Give the released vision+text checkpoint (--model PATH) if the adapter was trained on its weights.",
        )
    if wrapper is not None and wrapper.model_type not in model.wrappers:
        raise UserInputError(
            f"--to {request.target}: an adapter on the text model inside {wrapper.class_name} is not known to be "
            f"right in {server.title}.",
            why="The modules of its vision part have the same names.",
            fix=MERGE,
        )
    base = request.tuned.base.model_name_or_path
    own = (folder / "params.json").is_file() and (
        not looks_local(base) or any(folder.glob("consolidated*.safetensors"))
    )
    if model.mistral_format and not own:
        raise UserInputError(
            f"--to {request.target}: '{base}' lacks Mistral's own files (params.json, consolidated*.safetensors).",
            why=f"{server.title}'s class for {kind} reads those. With config.json alone another class serves it, in "
            "which adapters on experts are not known to be right.",
            fix="Use the folder of the whole release (--model PATH), or export merged weights: --to merged.",
        )


def low_rank(request: ExportRequest, changes: Mapping[str, WeightChange]) -> dict[str, LowRank]:
    found: dict[str, LowRank] = {}
    for name, change in changes.items():
        if isinstance(change, LowRank) and not change.transposed:
            found[name] = change
            continue
        words = {
            Dora: "has a DoRA adapter (lora.use_dora)",
            Rows: "has rows of its own for new tokens (model.new_tokens)",
            Replaced: "trained in full (lora.modules_to_save, lora.bias)",
            LowRank: "has an adapter on a transposed weight",
        }[type(change)]
        raise UserInputError(
            f"--to {request.target}: '{name}' {words}.",
            why="The server loads LoRA on linear layers and experts, and nothing else.",
            fix=MERGE,
        )
    return found


def check_modules(
    request: ExportRequest, server: Server, model: ServedModel, changes: Mapping[str, LowRank], base: nn.Module
) -> None:
    refused: dict[str, str] = {}
    for name, change in changes.items():
        place = LAYER.fullmatch(name)
        module = place["module"].removesuffix(".weight") if place is not None else name.removesuffix(".weight")
        if change.a.dim() == 3:
            block, _, parameter = name.rpartition(".")
            why = model.refused.get(module.rpartition(".")[0])
            if parameter not in WEIGHTS or model.experts is None:
                refused[module] = why or UNKNOWN
            else:
                _check_gate_above_up(request, block, base.get_submodule(block))
        elif (why := model.why_not(module, base.config)) is not None:
            refused[module] = why
        elif module.endswith("kv_a_proj_with_mqa") and server.ranks is None and not _has(base, name, "q_a_proj"):
            refused[module] = _ALONE
    if refused:
        first, why = next(iter(refused.items()))
        applied = [one.rpartition(".")[2] for one in model.modules if model.why_not(one, base.config) is None]
        without = f" Or train without it: lora.target_modules {', '.join(dict.fromkeys(applied))}." if applied else ""
        others = f" {len(refused) - 1} more: {', '.join(list(refused)[1:4])}." if len(refused) > 1 else ""
        raise UserInputError(
            f"--to {request.target}: {server.title} would not apply the adapter on '{first}'.",
            why=f"{why}{others} (Read in {server.source}.)",
            fix=f"{MERGE}{_elsewhere(server, base.config, refused)}{without}",
        )


def _elsewhere(server: Server, config: Any, refused: Collection[str]) -> str:
    for name, other in SERVERS.items():
        model = other.models.get(config.model_type)
        if other is not server and model is not None and all(model.why_not(one, config) is None for one in refused):
            return f" {other.title} applies it: --to {name}."
    return ""


def _has(base: nn.Module, name: str, sibling: str) -> bool:
    # transformers sets what a config leaves out to None.
    return getattr(base.get_submodule(name.rpartition(".")[0].rpartition(".")[0]), sibling, None) is not None


def _check_gate_above_up(request: ExportRequest, block: str, experts: nn.Module) -> None:
    """That the first half of gate_up_proj's rows is the gate's, by what the module itself computes of both."""
    while isinstance(experts, ParamWrapper):
        experts = experts.base_layer
    if (why := why_not_grouped(experts)) is None:
        width = experts.get_parameter(GATE_UP).shape[1]
        x = torch.linspace(-2, 3, 3 * width, device="cpu").view(3, width)
        gate, up = x.chunk(2, dim=-1)
        if torch.equal(experts._apply_gate(x), experts.act_fn(gate) * up):  # type: ignore[operator]
            return
        why = "rows of gate and up in another order than one above the other"
    raise UserInputError(f"--to {request.target}: the experts '{block}' have {why}.", fix=MERGE)
