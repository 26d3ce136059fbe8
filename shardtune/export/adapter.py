"""Target `adapter`: a PEFT folder that stands by itself, for whoever has the base model and PEFT."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file

from shardtune.checkpoint.adapter import WEIGHTS, write_adapter
from shardtune.checkpoint.wrapper import FOLDER as ON_WRAPPER
from shardtune.checkpoint.wrapper import write_for_wrapper
from shardtune.errors import ShardtuneError
from shardtune.export.base_files import (
    check_tokenizer,
    copy_licences,
    copy_tokenizer,
    write_chat_template,
    write_tokenizer,
)
from shardtune.export.base_name import hub_name
from shardtune.export.request import CardParts, Export, ExportLog, ExportRequest, Verification
from shardtune.inference.load import build_adapted
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers
from shardtune.run.evaluation import ADAPTER_CONFIG
from shardtune.terminal import count

if TYPE_CHECKING:
    from torch import Tensor

_USAGE = """```python
from peft import PeftModel
from transformers import {loader}

base = {loader}.from_pretrained("{base}", dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(base, "{{folder}}{inside}")
```"""


def prepare(request: ExportRequest) -> Export:
    """Raises:
    UserInputError: the adapter does not fit the base.
    """
    return AdapterExport(request)


class AdapterExport:
    """See `request.Export`."""

    def __init__(self, request: ExportRequest) -> None:
        self.request = request
        self.adapted = build_adapted(request.tuned, fp8=False)
        self.wrapper = self.adapted.meta_model.wrapper
        check_tokenizer(request.tuned, self.adapted.folder)
        self.base_name = hub_name(request.tuned.base, self.adapted.folder, request.base_name)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.adapted.tensors.values()) * (2 if self.wrapper is not None else 1)

    def write(self, folder: Path, log: ExportLog) -> None:
        tuned, adapted = self.request.tuned, self.adapted
        write_adapter(adapted.model, adapted.tensors, folder)
        if self.wrapper is not None:
            write_for_wrapper(adapted.model, adapted.tensors, folder, self.wrapper)
        name = self.base_name or adapted.folder.name
        for config in folder.rglob(ADAPTER_CONFIG):
            content = json.loads(config.read_text(encoding="utf-8"))
            # A path of this machine would be looked for on the reader's.
            content |= {"base_model_name_or_path": name, "revision": tuned.base.revision}
            config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.base_name is None:
            log.warn(
                f"The base model is known as a local folder only, so adapter_config.json calls it '{name}'. "
                "--base-name OWNER/NAME writes its name on the Hub."
            )
        copy_tokenizer(adapted.folder, folder)
        write_tokenizer(tuned, adapted.folder, folder, grown=False)
        write_chat_template(tuned, folder, log)
        copy_licences(adapted.folder, folder)

    def verify(self, folder: Path, log: ExportLog) -> Verification:
        """Loaded by plain PEFT onto the plain base, every tensor is there, and where it was."""
        section = self.request.tuned.base
        meta = build_meta_model(section, self.adapted.folder, read_headers(self.adapted.folder))
        rows = len(self.adapted.meta_model.model.get_input_embeddings().weight)  # type: ignore[arg-type]
        if rows > self.adapted.stored_rows:
            meta.model.resize_token_embeddings(rows, mean_resizing=False)
        config = PeftConfig.from_pretrained(str(folder))
        with warnings.catch_warnings():
            # PEFT looks for the patterns' keys among modules only; ours may name parameters (adapters/lora.py).
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            model = PeftModel(meta.model, config, low_cpu_mem_usage=True)
        found: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
        outcome = set_peft_model_state_dict(model, found, low_cpu_mem_usage=True)  # raises where a shape differs
        expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
        _compare(found, self.adapted.tensors, [*outcome.unexpected_keys, *(expected ^ set(found))])
        if self.wrapper is not None:
            beside = load_file(folder / ON_WRAPPER / WEIGHTS)
            kept = sorted(map(_digest, beside.values())) == sorted(map(_digest, self.adapted.tensors.values()))
            if not kept:
                raise ShardtuneError(f"{ON_WRAPPER}/ does not hold the same tensors.", fix="Export again.")
        text = f"all {count(len(found), 'tensor')} match a PEFT module of the base and are those of the run"
        return Verification("tensors", text, {"tensors": len(found)})

    def card(self) -> CardParts:
        wrapped = self.wrapper is not None
        loader = self.wrapper.class_name if self.wrapper is not None else type(self.adapted.meta_model.model).__name__
        usage = _USAGE.format(
            loader=loader, base=self.base_name or self.adapted.folder.name, inside=f"/{ON_WRAPPER}" if wrapped else ""
        )
        contents = "This is the adapter alone; it needs the base model."
        if self.wrapper is not None:
            contents += (
                f" `{ON_WRAPPER}/` fits {self.wrapper.class_name}, the vision+text model; the files beside it fit its "
                "text model alone."
            )
        return CardParts("peft", usage, contents=contents)


def _compare(found: dict[str, Tensor], wanted: dict[str, Tensor], misplaced: list[str]) -> None:
    differ = [*misplaced, *sorted(set(found) ^ set(wanted))]
    differ += [name for name in sorted(set(found) & set(wanted)) if not torch.equal(found[name], wanted[name])]
    if differ:
        raise ShardtuneError(
            "PEFT does not load the written adapter as it was trained.",
            why=f"{count(len(differ), 'tensor')} differ, for example {differ[0]}.",
            fix="Nothing was published. Please report this with the model's name.",
        )


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
