"""How does an adapter of the text model fit the vision+text model it came out of? The same tensors under its names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.other import ModulesToSaveWrapper

from shardtune.checkpoint.adapter import inference_config, write_adapter_files
from shardtune.model.families.family import Wrapper

if TYPE_CHECKING:
    from peft import PeftModel

FOLDER = "on-wrapper"
_OUTER = "base_model.model."
_LAYER = re.compile(r"(?P<head>.*?\.layers\.)(?P<layer>\d+)(?P<ending>\..*)")


def write_for_wrapper(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path, wrapper: Wrapper) -> None:
    """Write `folder/on-wrapper`, a PEFT adapter for the wrapper's class, and the mapping of names it was made with.

    Serving loads the whole vision+text model. The adapter's own names mean nothing there (PEFT only warns), and short
    target names such as `o_proj` would put adapters on the vision tower as well; so this one names its targets by
    where they are.
    """
    renamed = {_OUTER + served_name(name.removeprefix(_OUTER), wrapper.served): t for name, t in tensors.items()}
    config = inference_config(model)
    modules, parameters = _targets(model)
    served = [served_name(name, wrapper.served) for name in modules]
    config.target_modules = _pattern(served) if served else None
    config.target_parameters = [served_name(name, wrapper.served) for name in parameters] or None
    saved = [name.removeprefix(_OUTER) for name, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    config.modules_to_save = [served_name(name, wrapper.served) for name in saved] or None
    if config.trainable_token_indices:
        config.trainable_token_indices = {
            served_name(name, wrapper.served): ids for name, ids in config.trainable_token_indices.items()
        }
    out = folder / FOLDER
    write_adapter_files(config, renamed, out)
    about = {
        "wrapper": wrapper.class_name,
        "key_mapping": {
            f"^{re.escape(_OUTER + text)}": _OUTER + whole for text, whole in wrapper.served.items() if text != whole
        },
        "made_from": "the adapter in the folder above, which fits the text model alone",
    }
    (out / "key_mapping.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def served_name(name: str, served: Mapping[str, str]) -> str:
    """A name of the text model as the wrapper has it."""
    prefix = next((prefix for prefix in served if name.startswith(prefix)), "")
    return served.get(prefix, "") + name.removeprefix(prefix)


def _targets(model: PeftModel) -> tuple[list[str], list[str]]:
    modules, parameters = [], []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            bare = name.removeprefix(_OUTER).replace(".base_layer", "")
            if isinstance(module, ParamWrapper):
                parameters.append(f"{bare}.{module.parameter_name}")
            else:
                modules.append(bare)
    return modules, parameters


def _pattern(names: Iterable[str]) -> str:
    """A regular expression that matches just these names: one alternative for each ending, with the layers it is in."""
    layers: dict[tuple[str, str], list[str]] = {}
    whole = []
    for name in names:
        found = _LAYER.fullmatch(name)
        if found is None:
            whole.append(re.escape(name))
        else:
            layers.setdefault((found["head"], found["ending"]), []).append(found["layer"])
    return "|".join(
        [
            *whole,
            *(f"{re.escape(head)}(?:{'|'.join(own)}){re.escape(end)}" for (head, end), own in sorted(layers.items())),
        ]
    )
