"""Targets `vllm` and `sglang`: which adapter does the server compute exactly as it was trained?

Both ignore PEFT's `target_parameters`, SGLang and older vLLM also `rank_pattern` and `alpha_pattern`, without an error.
So every module, and every routed expert, gets 2-D tensors of one rank whose product needs no scale.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from peft import LoraConfig

from shardtune.adapters.weight_changes import LowRank, weight_changes
from shardtune.checkpoint.adapter import write_adapter_files
from shardtune.checkpoint.wrapper import served_name
from shardtune.errors import UserInputError
from shardtune.export.answer_end import AnswerEnd, missing_answer_end
from shardtune.export.request import CardParts, ExportLog, ExportRequest, Verification
from shardtune.export.served_checks import MERGE, check_modules, check_wrapper, low_rank
from shardtune.export.served_factors import Factors, max_rank, relative_difference, served_factors
from shardtune.export.served_models import SERVERS, ServedModel, Server, ServerName
from shardtune.export.served_reading import read_changes, wrong
from shardtune.inference.load import MetaAdapter, build_adapted, load_tuned_tokenizer
from shardtune.model.load import load_tokenizer
from shardtune.model.locate import looks_local
from shardtune.model.weight_loading import is_adapter, unwrapped_name
from shardtune.terminal import count

if TYPE_CHECKING:
    from torch import Tensor

_OUTER = "base_model.model."
_TEMPLATE = "chat_template.jinja"
_TOKENIZER = "--tokenizer-mode"
_EXACT = 1e-6  # float32 rounds the scale into B (6e-8); the norms are taken in float64


@dataclass(frozen=True)
class ServedAdapter:
    """The plan (`Export`).

    Attributes:
        changes: By the base parameter's name.
        shapes: Of the base's parameters.
        prefixes: Prefix of the text model's names → that of the model that is served.
        rank: Of every tensor that is written.
        flags: What the server has to be started with besides.
        template: The chat template of training, where the base has another.
        end: Of an answer, where the base goes on.
    """

    request: ExportRequest
    server: Server
    model: ServedModel
    changes: Mapping[str, LowRank]
    shapes: Mapping[str, tuple[int, ...]]
    prefixes: Mapping[str, str]
    rank: int
    flags: tuple[str, ...]
    template: str | None
    end: AnswerEnd | None

    @property
    def nbytes(self) -> int:
        factors = served_factors(_on_meta(self.changes), self.shapes, self.model.experts)
        return sum(one.a.nbytes + one.b.nbytes for one in factors)

    def write(self, folder: Path, log: ExportLog) -> None:
        tensors: dict[str, Tensor] = {}
        for one in self._factors():
            name = _OUTER + served_name(one.module, self.prefixes)
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = one.a, one.b
        write_adapter_files(self._config(), tensors, folder)
        if self.template is not None:
            (folder / _TEMPLATE).write_text(self.template, encoding="utf-8")
        if self.end is not None:
            self.end.write(folder, log)
        log.say("adapter", f"{len(tensors) // 2} modules of rank {self.rank}, float32, scale 1")
        log.say("serve", self._serve)

    def verify(self, folder: Path, log: ExportLog) -> Verification:
        """Read the file as the server does and compare each parameter's change with that of the adapter."""
        found = read_changes(folder, self.shapes, self.prefixes, self.model.experts)
        worst, zeros = 0.0, 0
        for name, (a, b) in found.items():
            change = self.changes.get(name)
            if change is None:
                zeros += 1
                if b.any():
                    raise wrong(f"'{name}' has an adapter in the file and was not trained")
                continue
            difference = relative_difference(change, a, b)
            if not difference <= _EXACT:  # of values that are not finite, too
                raise wrong(f"its change of '{name}' differs from that of the adapter by {difference:.1e} of its size")
            worst = max(worst, difference)
        if missing := sorted(set(self.changes) - set(found)):
            raise wrong(f"{len(missing)} parameters have none in the file, for example '{missing[0]}'")
        text = (
            f"read back as {self.server.title} reads it, all {count(len(self.changes), 'weight update')} match the "
            f"adapter's ({f'largest difference {worst:.0e} of its size' if worst else 'identical'})"
        )
        return Verification(
            "deltas", text, {"parameters": len(self.changes), "largest_difference": worst, "filled_with_zeros": zeros}
        )

    def card(self) -> CardParts:
        base = self._served_base
        asked = self.adapter_name if self.server.package == "vllm" else f"{base}:{self.adapter_name}"
        usage = (
            f"```bash\n{self.command(self.request.out.name)}\n```\n\n"
            f"Requests name the adapter as their model: `{asked}`. "
            f"Names and layout are those that {self.server.source} loads."
        )
        contents = (
            f"A LoRA adapter for {self.server.title}: plain 2-D tensors of rank {self.rank} for each module and each "
            "routed expert, filled up with zeros, the scale multiplied into B. PEFT's own form of it is what "
            "`shardtune export --to adapter` writes"
            + ("; PEFT does not load this one, because transformers keeps experts fused." if self._experts else ".")
        )
        return CardParts("peft", usage, (self.server.package,), contents, self._serve)

    @property
    def adapter_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.request.tuned.name).strip("-") or "tuned"

    def command(self, folder: str) -> str:
        """What starts the server with the adapter. Flags are those of the sources in `served_models`."""
        section, name = self.request.tuned.base, self.adapter_name
        base = self._served_base
        given = f"{name}={folder}"
        if self.server.ranks is not None:
            limit = next(rank for rank in self.server.ranks if rank >= self.rank)
            if set("=,") & set(folder):  # vLLM splits at each "=", and takes what has a comma for JSON
                given = json.dumps({"name": name, "path": folder})
            words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(limit)]
            words += ["--lora-modules", given]
        else:
            words = ["python", "-m", "sglang.launch_server", "--model-path", base]
            words += ["--enable-lora", "--lora-paths", given, "--max-lora-rank", str(self.rank)]
            words += ["--max-loras-per-batch", "2", "--lora-strict-loading"]
        if section.revision is not None and not looks_local(base):
            words += ["--revision", section.revision]
        words += self.flags
        if self.template is not None:
            words += ["--chat-template", f"{folder}/{_TEMPLATE}"]
        if self.end is not None and self.server.ranks is not None:
            words += ["--generation-config", folder]
        elif self.end is not None:  # SGLang reads the base's generation_config.json alone
            words += ["--json-model-override-args", json.dumps({"eos_token_id": self.end.settings["eos_token_id"]})]
        return shlex.join(words)

    @property
    def _serve(self) -> str:
        """By absolute paths: a server may be started in any folder."""
        return self.command(str(self.request.out.absolute()))

    @property
    def _served_base(self) -> str:
        name = self.request.tuned.base.model_name_or_path
        return str(Path(name).expanduser().absolute()) if looks_local(name) else name

    @property
    def _experts(self) -> bool:
        return any(change.a.dim() == 3 for change in self.changes.values())

    def _factors(self) -> Iterator[Factors]:
        return served_factors(self.changes, self.shapes, self.model.experts)

    def _config(self) -> LoraConfig:
        """No patterns and no parameters; with lora_alpha = r the scale is exactly 1."""
        named = served_factors(_on_meta(self.changes), self.shapes, self.model.experts)
        modules = {one.module.rpartition(".")[2] for one in named}
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,
            target_modules=sorted(modules),
            lora_dropout=0.0,
            bias="none",
            use_rslora=False,
            task_type="CAUSAL_LM",
            inference_mode=True,
            base_model_name_or_path=self.request.tuned.base.model_name_or_path,
        )
        config.target_modules = sorted(modules)  # PEFT keeps a set, in another order each time
        return config


def prepare(request: ExportRequest) -> ServedAdapter:
    """Raises:
    UserInputError: the server does not compute this adapter as it was trained.
    """
    name = request.target
    assert name in get_args(ServerName)
    server = SERVERS[name]  # type: ignore[index]
    adapted = build_adapted(request.tuned, fp8=False)
    meta_model = adapted.meta_model
    kind = str(meta_model.model.config.model_type)
    model = server.models.get(kind)
    if model is None:
        raise UserInputError(
            f"--to {name}: which modules of a {kind} model {server.title} applies LoRA to is not known here.",
            why=f"Known are {', '.join(sorted(server.models))} (read in {server.source}).",
            fix=MERGE,
        )
    check_wrapper(request, server, model, meta_model, adapted.folder)
    changes = low_rank(request, weight_changes(adapted.model, adapted.tensors))
    check_modules(request, server, model, changes, meta_model.model)
    rank = max_rank(changes)
    if server.ranks is not None and rank > server.ranks[-1]:
        raise UserInputError(
            f"--to {name}: the adapter has rank {rank}, and {server.title} takes up to {server.ranks[-1]}.", fix=MERGE
        )
    wrapper = meta_model.wrapper
    template = _other_template(request, adapted.folder)
    return ServedAdapter(
        request,
        server,
        model,
        changes,
        {parameter: tuple(p.shape) for parameter, p in _base_parameters(adapted)},
        wrapper.served if wrapper is not None else {},
        rank,
        model.flags if template is None else _flags_for_template(server, model, adapted.folder),
        template,
        missing_answer_end(request.tuned, adapted.folder),
    )


def _base_parameters(adapted: MetaAdapter) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in adapted.model.named_parameters():
        if not is_adapter(name):
            yield unwrapped_name(name), parameter


def _other_template(request: ExportRequest, folder: Path) -> str | None:
    tuned = load_tuned_tokenizer(request.tuned, folder).chat_template
    base = load_tokenizer(request.tuned.base, folder).chat_template
    return tuned if isinstance(tuned, str) and tuned != base else None


def _flags_for_template(server: Server, model: ServedModel, folder: Path) -> tuple[str, ...]:
    """Mistral's own tokenizer ignores --chat-template, and left alone vLLM chooses that one where it finds its file."""
    others = tuple(word for before, word in pairwise(("", *model.flags)) if _TOKENIZER not in (before, word))
    own = [*folder.glob("tekken.json"), *folder.glob("tokenizer.model.v*")]
    return (*others, _TOKENIZER, "hf") if server.package == "vllm" and (own or others != model.flags) else model.flags


def _on_meta(changes: Mapping[str, LowRank]) -> dict[str, LowRank]:
    return {
        name: LowRank(change.a.to("meta"), change.b.to("meta"), change.scale, change.transposed)
        for name, change in changes.items()
    }
