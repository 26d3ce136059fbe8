"""What does somebody who finds the model need to know? README.md: data, settings, results, hardware, versions, use."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from shardtune import __version__
from shardtune.checkpoint.final import source_of_adapter, weights_sha256
from shardtune.config.redact import hide_text, hide_values, redacted_settings
from shardtune.config.schema import DataSection, LoraSection, ModelSection, TrainSection
from shardtune.export.base_name import hub_name, licence
from shardtune.model.locate import looks_local, same_name
from shardtune.report.evaluations import FOLDER as EVALUATIONS
from shardtune.report.evaluations import seen_in_training, with_interval
from shardtune.report.formatting import loss, plain, seconds
from shardtune.report.header import facts
from shardtune.report.history import RunHistory
from shardtune.report.read import listed, mapping, number, read_json, text, whole
from shardtune.report.results import results_of

if TYPE_CHECKING:
    from shardtune.export.request import CardParts, ExportRequest, Verification
    from shardtune.inference.source import TunedModel

CARD = "README.md"
# What decides what is learnt. Paths, names of accounts and where things ran are no settings of these.
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "model": ("torch_dtype", "base_precision", "new_tokens"),
    "lora": tuple(name for name in LoraSection.model_fields if name != "task_type"),
    "data": ("format", "train_on", "max_length", "long_rows", "concatenate", "append_eos"),
    "train": (
        "num_train_epochs", "max_steps", "effective_batch_size", "per_device_train_batch_size",
        "gradient_accumulation_steps", "optim", "optim_args", "learning_rate", "lr_scheduler_type",
        "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "loss",
        "label_smoothing_factor", "router_aux_loss_coef", "neftune_noise_alpha", "packing", "load_best_model_at_end",
        "seed", "data_seed",
    ),
}  # fmt: skip
_SECTIONS: Mapping[str, type[BaseModel]] = {
    "model": ModelSection, "lora": LoraSection, "data": DataSection, "train": TrainSection,
}  # fmt: skip
_ALWAYS = {"lora": ("r", "lora_alpha", "target_modules"), "train": ("optim", "learning_rate", "lr_scheduler_type")}
_PATH = re.compile(r"(?<![\w:/.~-])(?:file://)?(?:~\w*/|/)(?:[\w.@+ -]+/)*[\w.@+-]+")
_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|tsv|txt|arrow)(\.\w+)?$", re.IGNORECASE)
_DATA_LINES = (("training", "Data"), ("validation", "Validation"))
_MOST_EVALUATIONS = 5


def write_card(
    request: ExportRequest, base: Path, parts: CardParts, verification: Verification, warnings: list[str], folder: Path
) -> None:
    """Write README.md into `folder`. It holds no path of this machine, no host and no secret.

    Args:
        base: Folder of the base's files, whose card names the licence.
    """
    name = hub_name(request.tuned.base, base, request.base_name)
    front: dict[str, Any] = {}
    if name is not None:
        front |= {"base_model": name, "base_model_relation": "adapter" if parts.library == "peft" else "finetune"}
    front |= {"library_name": parts.library, "pipeline_tag": "text-generation", **licence(base)}
    front["tags"] = ["shardtune", "lora", *parts.tags]
    of = name or f"the model in the local folder '{base.name}'"
    body = "\n\n".join(filter(None, _sections(request, of, parts, verification, warnings)))
    if request.tuned.config is not None:
        body = hide_values(body, request.tuned.config)
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    (folder / CARD).write_text(f"---\n{head}---\n\n{without_paths(hide_text(body))}\n", encoding="utf-8")


def without_paths(text: str) -> str:
    """A text with the last part of each absolute path alone."""
    return _PATH.sub(lambda found: found.group().rpartition("/")[2], text)


def _sections(
    request: ExportRequest, base: str, parts: CardParts, verification: Verification, warnings: list[str]
) -> Iterator[str]:
    tuned = request.tuned
    yield f"# {plain(request.out.name if tuned.run is None else tuned.name, 100)}"
    yield f"A LoRA fine-tune of {base}, made with shardtune. {parts.contents}".strip()
    yield f"## Use\n\n{parts.usage.replace('{folder}', request.out.name)}" if parts.usage else ""
    if tuned.run is None:
        yield "## Training\n\nThe adapter was not in the folder of a run: how it was trained is not known."
    else:
        history = RunHistory(tuned.run)
        history.update()
        yield from _training(request, history)
    yield _evaluations(tuned)
    yield _export(verification, warnings)


def _training(request: ExportRequest, history: RunHistory) -> Iterator[str]:
    known = {one["name"]: one["value"] for one in facts(history, [])}
    lines = [f"- {label}: {known[name]}" for label, name in _DATA_LINES if name in known]
    config = request.tuned.config
    if config is not None:
        given = config.data.dataset_name_or_path
        sources = [given] if isinstance(given, str) else [one if isinstance(one, str) else one.path for one in given]
        named = ", ".join(_source(one) for one in sources)
        lines.insert(0, f"- source: {named}")
    if found := text(mapping(mapping(history.facts.data).get("format")).get("name")):
        lines.append(f"- format: {found}")
    yield "## Data\n\n" + "\n".join(lines) if lines else ""
    if config is not None:
        settings = _settings(redacted_settings(config))
        shown = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip()
        trains = f"{known['Trains']}.\n\n" if "Trains" in known else ""
        yield f"## Settings\n\n{trains}```yaml\n{shown}\n```"
    yield _results(request, history)
    hardware = [f"- {known['Hardware']}"] if "Hardware" in known else []
    start = history.facts.starts[-1] if history.facts.starts else {}
    about = mapping(start.get("environment"))
    versions = [f"{name} {version}" for name, version in mapping(about.get("packages")).items()]
    if about.get("python"):
        versions.append(f"Python {text(about.get('python'))}")
    if versions:
        hardware.append(f"- {', '.join(versions)}")
    yield "## Hardware and versions\n\n" + "\n".join(hardware) if hardware else ""


def _source(path: str) -> str:
    """A hub name as it is; of a path or a URL the last part."""
    local = path.count("/") != 1 or looks_local(path) or _DATA_FILE.search(path) is not None
    return re.split(r"[/\\]", path.rstrip("/"))[-1] if local else path


def _settings(written: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that are not the default, and those by which people compare runs."""
    shown: dict[str, dict[str, Any]] = {}
    for section, names in _SETTINGS.items():
        fields = _SECTIONS[section].model_fields
        for name in names:
            value = written.get(section, {}).get(name)
            if name == "base_precision" and value == "bf16":
                continue  # not in 8 bits: what it is computed in says torch_dtype, which may be another
            default = fields[name].get_default(call_default_factory=True)
            if value is not None and (value != default or name in _ALWAYS.get(section, ())):
                shown.setdefault(section, {})[name] = value
    return shown


def _results(request: ExportRequest, history: RunHistory) -> str:
    results = results_of(history, time.time())
    lines = []
    if results.last_loss is not None and results.first_loss is not None:
        lines.append(
            f"- training loss {loss(results.first_loss)} → {loss(results.last_loss)} in {results.step:,} steps"
        )
    if results.last_eval is not None:
        lines.append(f"- validation loss {loss(results.last_eval[1])} at step {results.last_eval[0]:,}")
    if results.best_eval is not None and results.best_eval != results.last_eval:
        lines.append(f"- best validation loss {loss(results.best_eval[1])} at step {results.best_eval[0]:,}")
    if results.tokens is not None:
        lines.append(f"- {results.tokens:,} tokens")
    if results.seconds is not None:
        lines.append(f"- {seconds(results.seconds)} from the first to the last event")
    if lines and (exported := _step(request.tuned)) is not None:
        lines.append(f"- exported: {exported}")
    return "## Results\n\n" + "\n".join(lines) if lines else ""


def _step(tuned: TunedModel) -> str | None:
    """Which step the exported weights are of."""
    source = source_of_adapter(tuned.run, tuned.adapter, tuned.step)
    if source is None:
        return None
    value = f", validation loss {loss(source.eval_loss)}" if source.eval_loss is not None else ""
    return f"the weights of step {source.step:,}{value}"


def _evaluations(tuned: TunedModel) -> str:
    """Tables of `shardtune eval` about the exported weights on the exported base, the newest first."""
    if tuned.run is None:
        return ""
    try:
        files = list((tuned.run / EVALUATIONS).glob("*.json"))
    except OSError:
        return ""
    source, digest = source_of_adapter(tuned.run, tuned.adapter, tuned.step), weights_sha256(tuned.adapter)
    found = [result for path in files if whole((result := read_json(path)).get("schema")) == 1]
    found = [result for result in found if _is_of(result, digest, source.step if source else None, tuned.base)]
    found.sort(key=lambda result: number(result.get("time")) or 0.0, reverse=True)
    tables = [_evaluation(result) for result in found[:_MOST_EVALUATIONS]]
    return "## Evaluation\n\n" + "\n\n".join(tables) if tables else ""


def _is_of(result: Mapping[str, Any], digest: str, step: int | None, base: ModelSection) -> bool:
    """Whether an evaluation is of these weights. Earlier versions recorded no checksum: then by step."""
    known = text(result.get("adapter_sha256"))
    same = known == digest if known else step is not None and whole(result.get("step")) == step
    return same and same_name(text(result.get("base_model")), base.model_name_or_path)


def _evaluation(result: Mapping[str, Any]) -> str:
    data = mapping(result.get("data"))
    about = [
        "validation rows of the run" if data.get("own_validation") is True else _source(text(data.get("path")) or "-"),
        f"{whole(data.get('rows')):,} rows" if whole(data.get("rows")) else "",
        *seen_in_training(data),
        f"step {step:,}" if (step := whole(result.get("step"))) is not None else "",
    ]
    title = ", ".join(filter(None, about)) if data else "lm-evaluation-harness"
    rows = ["| metric | base | tuned |", "|---|---|---|"]
    for one in (mapping(entry) for entry in (*listed(result.get("metrics")), *listed(result.get("tasks")))):
        name = " ".join(filter(None, (text(one.get("task")), text(one.get("title")) or text(one.get("name")))))
        sides = [mapping(one.get(side)) for side in ("base", "tuned")]
        cells = [with_interval(side, text(one.get("kind"))) for side in sides]
        rows.append(f"| {plain(name, 120).replace('|', '/')} | {' | '.join(cells)} |")
    return f"{plain(title, 200)}; 95 % intervals in brackets:\n\n" + "\n".join(rows)


def _export(verification: Verification, warnings: list[str]) -> str:
    lines = [f"Written by `shardtune export` {__version__}. Verified: {verification.text}."]
    lines += [f"- {warning}" for warning in warnings]
    return "## Export\n\n" + "\n".join(lines)
