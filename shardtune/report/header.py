"""What was run? Model, data, hardware, date and command, at the top of a run's page; its scores, and how to ask it."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

from shardtune.checkpoint.final import FINAL, read_source
from shardtune.checkpoint.store import CheckpointStore
from shardtune.report import formatting
from shardtune.report.history import RunHistory
from shardtune.report.read import listed, mapping, number, text, whole
from shardtune.report.script import LOGS, log_files
from shardtune.report.settings import Setting, bare
from shardtune.report.status import State
from shardtune.report.tables import spans

CHECKPOINTS, ADAPTER_WEIGHTS = "checkpoints", "adapter_model.safetensors"  # a test compares
_MOST_META, _MOST_SCORES, _MOST_LOGS = 40, 12, 4


def facts(run: RunHistory, settings: list[Setting]) -> list[dict[str, str]]:
    """(name, value) in display order; what is not known has no line."""
    values = {setting.path: bare(setting.value) for setting in settings}
    start = run.facts.starts[-1] if run.facts.starts else {}
    meta = list(mapping(start.get("meta")).items())[:_MOST_META]
    found = [
        ("Model", _joined(values.get("model.model_name_or_path") or text(start.get("model")), _base(run))),
        ("Trains", _trained(run, values)),
        ("Data", ": ".join(filter(None, (values.get("data.dataset_name_or_path"), _rows(run, "train"))))),
        ("Validation", _rows(run, "validation")),
        ("Published", _published(run)),
        ("Hardware", _hardware(run)),
        ("Started", _when(run)),
        ("Script", text(start.get("script")) or (run.script.name if run.script is not None else "")),
        ("Command", text(start.get("command")) or (run.script.line if run.script is not None else "")),
        ("Exit code", _exit_code(run)),
        ("Logs", _logs(run)),
        *((str(name), value if isinstance(value, str) else str(value)) for name, value in meta),
    ]
    return [
        {"name": formatting.plain(name, 80), "value": formatting.plain(value, 1000)} for name, value in found if value
    ]


def ask_command(run: RunHistory, state: State) -> str:
    """What asks the trained model, for a run that has ended and left one; empty where there is nothing to ask."""
    if run.script is not None or state in ("starting", "running"):
        return ""
    folder = shlex.quote(str(run.folder.absolute()))
    if (run.folder / FINAL / ADAPTER_WEIGHTS).is_file():
        return f"shardtune chat {folder} --web"
    try:
        steps = CheckpointStore(run.folder / CHECKPOINTS, keep=None).steps()
    except OSError:
        return ""
    return f"shardtune chat {folder} --checkpoint latest --web" if steps else ""


def scores(run: RunHistory) -> list[dict[str, str]]:
    """A tile for each `score` event's metric: after training, and before."""
    found: dict[str, dict[str, str]] = {}
    for event in run.facts.scores:
        name, when, value = text(event.get("name")), text(event.get("when")), number(event.get("value"))
        if name and value is not None:
            unit = text(event.get("unit"))
            shown = formatting.plain(f"{value:.3g} {unit}" if unit else formatting.loss(value), 40)
            score = found.setdefault(formatting.plain(name, 80), {})
            score[when] = shown
            score["rows"] = formatting.count(whole(event.get("rows")) or 0, "test row")
    return [
        {
            "name": name,
            "value": score.get("after", "–"),
            "note": f"before: {score['before']}, {score['rows']}" if "before" in score else score["rows"],
        }
        for name, score in list(found.items())[:_MOST_SCORES]
    ]


def _joined(name: str, more: str) -> str:
    return f"{name} ({more})" if name and more else name or more


def _base(run: RunHistory) -> str:
    base = whole(mapping(mapping(run.facts.plan).get("adapters")).get("base"))
    return f"{base:,} parameters" if base else ""


def _trained(run: RunHistory, values: dict[str, str]) -> str:
    found = mapping(mapping(run.facts.plan).get("adapters"))
    trainable, total, base = (number(found.get(name)) for name in ("trainable", "total", "base"))
    if not trainable or not total or not base:
        return ""
    in_full = number(found.get("in_full")) or 0.0
    covers = sum(number(mapping(row).get("covers")) or 0.0 for row in listed(found.get("rows"))) - in_full
    rank = f"LoRA, rank {values['lora.r']}: " if values.get("lora.r") else ""
    return (
        f"{rank}{trainable:,.0f} parameters, {formatting.percent(trainable / total)} of all; adapters on "
        f"{formatting.percent(covers / base)} of the weights"
        f"{f'; {formatting.percent(in_full / base)} train in full' if in_full else ''}"
    )


def _rows(run: RunHistory, part: str) -> str:
    counts = mapping(mapping(run.facts.data).get(part))
    rows, tokens, supervised = (whole(counts.get(name)) for name in ("rows", "tokens", "supervised"))
    if not rows or not tokens:
        return ""
    share = f", {supervised:,} supervised ({100 * supervised / tokens:.0f} %)" if supervised is not None else ""
    return f"{formatting.count(rows, 'row')}, {formatting.count(tokens, 'token')}{share}"


def _published(run: RunHistory) -> str:
    """Which step `final/` is of, and by what it was chosen afterwards (`shardtune best --to-final`)."""
    source = read_source(run.folder / FINAL)
    if source is None:
        return ""
    parts = [f"step {source.step:,}"]
    if source.eval_loss is not None:
        parts.append(f"eval loss {formatting.loss(source.eval_loss)}")
    if source.metric:
        parts.append(f"chosen by {source.metric}")
    return f"{FINAL}/ is {', '.join(parts)}"


def _hardware(run: RunHistory) -> str:
    """Each kind of node once; several ranks of one node may have recorded it."""
    start = run.facts.starts[-1] if run.facts.starts else {}
    nodes = {text(event.get("host")): event for _, event in sorted(run.facts.hardware.items())}
    described = [_node(event) for event in nodes.values()] or [_node(mapping(start.get("environment")))]
    kinds = Counter(filter(None, described))
    parts = [f"{number_of} nodes, each {kind}" if number_of > 1 else kind for kind, number_of in kinds.items()]
    processes = whole(start.get("world_size"))
    return "; ".join([*parts, *([formatting.count(processes, "process", "es")] if processes else [])])


def _node(event: dict[str, Any]) -> str:
    names = [text(gpu) or text(mapping(gpu).get("name")) or "GPU" for gpu in listed(event.get("gpus"))]
    if names:
        return ", ".join(f"{number_of} × {name}" for name, number_of in Counter(names).items())
    cpu = mapping(event.get("cpu"))
    threads = whole(cpu.get("threads")) or whole(event.get("cpus"))
    known = [text(cpu.get("model")), formatting.count(threads, "CPU") if threads else ""]
    return ", ".join([*filter(None, known), "no GPU"]) if any(known) else ""


def _exit_code(run: RunHistory) -> str:
    return "" if run.script is None or run.script.exit_code is None else str(run.script.exit_code)


def _logs(run: RunHistory) -> str:
    logs = log_files(run.folder)
    if len(logs) > _MOST_LOGS:
        return f"{LOGS}/rank-N.log of ranks {spans(set(logs))}"
    return ", ".join(f"{LOGS}/{path.name}" for path in logs.values())


def _when(run: RunHistory) -> str:
    if run.first_time is None:
        return formatting.when(run.script.started) if run.script is not None and run.script.started else ""
    host = text(mapping(run.facts.starts[-1].get("environment")).get("host")) if run.facts.starts else ""
    return _joined(formatting.when(run.first_time), f"on {host}" if host else "")
