"""Which tables does a run's page have? Checkpoints, ranks, problems, data, adapters, the machine."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from shardtune.checkpoint.store import CheckpointStore
from shardtune.observe.schema import DIMENSIONS
from shardtune.report import formatting
from shardtune.report.columns import Columns
from shardtune.report.history import Mark, RunHistory
from shardtune.report.read import Event, listed, mapping, number, read_json, text, whole
from shardtune.report.results import Results
from shardtune.report.script import LOGS, last_lines, log_files

Cell = str | dict[str, str]
Table = dict[str, Any]
_MOST_ROWS = 200
_MOST_SAMPLES = 30
_MOST_LOGS = 4
_OF_EVENT = ("v", "time", "rank", "event")
_SIZES = ("total", "free", "available", "memory", "ram", "size")  # names of sizes in bytes
_SENT = {"sent": "collectives", "to other nodes": "collectives_between_nodes"}
_PHASES = ("data", "forward", "backward", "optimizer", "collective")


def table(columns: list[str], rows: list[list[Cell]], *, numbers: str = "", note: str = "") -> Table:
    """A table for the page.

    Args:
        numbers: One character per column: `n` is aligned as a number.
    """
    kinds = numbers[: len(columns)].ljust(len(columns))
    heads = [{"name": name, "number": kind == "n"} for name, kind in zip(columns, kinds, strict=True)]
    return {"columns": heads, "rows": rows, "note": note}


def checkpoints(run: RunHistory) -> Table | None:
    """What is on disk now, and which is the best and why; `shardtune checkpoints --verify` checks the contents."""
    store = CheckpointStore(run.folder / "checkpoints", keep=None)
    try:
        steps, best = store.steps(), store.best()
    except OSError:
        return None
    rows: list[list[Cell]] = []
    for step in steps:
        manifest = store.manifest(step)
        loss = manifest.eval_loss if manifest else None
        written = number(manifest.about.get("time")) if manifest else None
        marks = [name for name, is_it in (("latest", step == steps[-1]), ("best", best and step == best[0])) if is_it]
        rows.append(
            [
                f"{step:,}",
                formatting.loss(loss) if loss is not None else "",
                formatting.memory(manifest.size) if manifest else {"text": "manifest damaged", "tone": "bad"},
                formatting.when(written) if written else "",
                {"text": ", ".join(marks), "tone": "best" if "best" in marks else "soft"},
            ]
        )
    if not rows:
        return None
    why = why_best(store, *best) if best else ""
    found = table(["step", "eval loss", "size", "written", ""], rows[-_MOST_ROWS:], numbers="nnn", note=why)
    return without_empty(found) if run.script is not None else found


def why_best(store: CheckpointStore, step: int, eval_loss: float) -> str:
    """Why this checkpoint is marked as the best: its eval loss, or what `shardtune best` found."""
    choice = store.choice()
    if choice is None or choice.step != step:
        return f"Best: step {step:,} has the lowest evaluation loss of those kept ({formatting.loss(eval_loss)})."
    chosen = f"{formatting.plain(choice.metric, 40)} {formatting.loss(choice.value)}"
    why = f" ({formatting.plain(choice.why, 80)})" if choice.why != choice.metric else ""
    lowest, loss = store.by_eval_loss()[0]
    other = (
        f" The lowest evaluation loss is that of step {lowest:,} ({formatting.loss(loss)})." if lowest != step else ""
    )
    return f"Best: step {step:,} was chosen by `shardtune best`: {chosen}{why}.{other}"


def without_empty(found: Table) -> Table:
    """Without the columns that are empty in every row."""
    kept = [
        i for i in range(len(found["columns"]))
        if any((row[i]["text"] if isinstance(row[i], dict) else row[i]) for row in found["rows"])
    ]  # fmt: skip
    return {
        **found,
        "columns": [found["columns"][i] for i in kept],
        "rows": [[row[i] for i in kept] for row in found["rows"]],
    }


def ranks(run: RunHistory) -> Table | None:
    """Means of every rank over all steps; a rank that is slower than the others is highlighted."""
    timed = {rank: columns for rank, columns in sorted(run.profile.items()) if len(columns)}
    if not timed:
        return None
    names = [phase for phase in _PHASES if any(f"seconds.{phase}" in c.names for c in timed.values())]
    optional = {
        "tok/s per rank": ("tokens_per_second", formatting.short),
        f"{formatting.plain(run.sample_unit, 40)}/s per rank": ("samples_per_second", formatting.short),
        "MFU": ("mfu", formatting.percent),
        "HFU": ("hfu", formatting.percent),
        "GPU peak": ("memory.peak", formatting.memory),
        "host": ("host.rss", formatting.memory),
    }
    shown = {name: spec for name, spec in optional.items() if any(spec[0] in c.names for c in timed.values())}
    sent = {name: group for name, group in _SENT.items() if any(_sent(c, group) for c in timed.values())}
    pace = {rank: _mean(columns, "seconds.step") for rank, columns in timed.items()}
    known = [value for value in pace.values() if value is not None]
    rows: list[list[Cell]] = []
    for rank, columns in list(timed.items())[:_MOST_ROWS]:
        step = pace[rank]
        slow = step is not None and len(known) > 1 and step > 1.05 * float(np.median(known))
        row: list[Cell] = [f"{rank}", _slow(step, slow), *(_spelt(_mean(columns, f"seconds.{n}")) for n in names)]
        row += [formatting.memory(_sent(columns, group)) for group in sent.values()]
        for column, show in shown.values():
            found = _most(columns, column) if column in ("memory.peak", "host.rss") else _mean(columns, column)
            row.append(show(found) if found is not None else "")
        rows.append([*row, _reasons(run.throttled.get(rank), len(columns))])
    heads = ["rank", "step time", *names, *sent, *shown, "throttled"]
    left = len(timed) - len(rows)
    note = "Means over all steps except the first; memory is the maximum." + (
        f" {left} more ranks are not shown." if left else ""
    )
    if not run.throttled:
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return table(heads, rows, numbers="n" * (len(heads) - bool(run.throttled)), note=note)


def _slow(step: float | None, slow: bool) -> Cell:
    return {"text": _spelt(step), "tone": "warn"} if slow else _spelt(step)


def _spelt(value: float | None) -> str:
    return formatting.seconds(value) if value is not None else ""


def _mean(columns: Columns, name: str) -> float | None:
    values = columns.get(name)[1]
    values = values[1:] if len(values) > 1 else values
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _sent(columns: Columns, group: str) -> float:
    """Bytes of the last step, in all dimensions of the mesh: a run may go on with another mesh."""
    last = (columns.get(f"{group}.{dimension}")[1] for dimension in DIMENSIONS)
    return sum(float(values[-1]) for values in last if len(values) and np.isfinite(values[-1]))


def _most(columns: Columns, name: str) -> float | None:
    values = columns.get(name)[1]
    return float(values.max()) if len(values) else None


def _reasons(found: Counter[str] | None, steps: int) -> Cell:
    if not found:
        return ""
    reasons = ", ".join(f"{reason} in {count:,}" for reason, count in found.most_common(3))
    return {"text": f"{reasons} of {steps:,} steps", "tone": "warn"}


def problems(run: RunHistory) -> Table | None:
    """Guards, warnings and failures, the latest last."""
    marks = [mark for mark in run.reported_marks() if mark.kind in ("guard", "warning", "failure")]
    found = sorted(marks, key=lambda mark: mark.time)
    if not found:
        return None
    rows = [_problem(mark) for mark in found[-_MOST_ROWS:]]
    left = len(found) - len(rows) + run.marks_left_out
    note = f"{left:,} more are in the event files." if left else ""
    return table(["step", "what", "", "ranks", "time"], rows, numbers="n", note=note)


def _problem(mark: Mark) -> list[Cell]:
    tone = {"failure": "bad", "guard": "warn"}.get(mark.kind, "warn")
    action = text(mark.detail.get("action"))
    name = text(mark.detail.get("guard")) or text(mark.detail.get("about")) or mark.kind
    rows = [str(row) for row in listed(mark.detail.get("rows")) if isinstance(row, str | int)]
    message = mark.text + (f" Rows: {', '.join(rows[:12])}{' …' if len(rows) > 12 else ''}." if rows else "")
    ranks = {rank for rank in listed(mark.detail.get("ranks")) if isinstance(rank, int)} or mark.ranks
    what = f"{name}: {action}" if action and action != "warn" else name
    return [
        f"{mark.step:,}",
        {"text": formatting.plain(what, 80), "tone": tone},
        formatting.plain(message, 2000),
        spans(ranks),
        formatting.when(mark.time),
    ]


def spans(numbers: set[int]) -> str:
    """{0, 1, 2, 5} → `0–2, 5`."""
    parts: list[list[int]] = []
    for value in sorted(numbers):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts[:20])


def out_of_memory(run: RunHistory) -> list[Table]:
    """For each rank that ran out: what used the memory, and what would free enough."""
    found = []
    for event in run.facts.out_of_memory[:4]:
        held = {str(name): size for name, value in mapping(event.get("held")).items() if (size := number(value))}
        rows: list[list[Cell]] = [
            [formatting.plain(name, 60), formatting.memory(size)]
            for name, size in sorted(held.items(), key=lambda item: -item[1])
        ]
        facts = [
            f"{label} {formatting.memory(value)}"
            for label, key in (("requested", "wanted"), ("free", "free"), ("capacity", "capacity"))
            if (value := number(event.get(key))) is not None
        ]
        title = f"Out of memory: rank {event.get('rank')}, {text(event.get('phase'))}, step {event.get('step', '?')}"
        found.append(
            {
                "title": formatting.plain(title, 120),
                **table(["used by", "size"], rows, numbers=" n", note=", ".join(facts)),
            }
        )
        advice = _advice(event)
        if advice is not None:
            found.append(advice)
    return found


def _advice(event: Event) -> Table | None:
    rows: list[list[Cell]] = []
    for part in listed(event.get("advice")):
        item = mapping(part)
        frees = number(item.get("frees"))
        setting = f"{text(item.get('setting'))}={formatting.plain(item.get('value', ''), 60)}"
        freed = formatting.memory(frees) if frees is not None else ""
        rows.append(
            [
                {"text": formatting.plain(setting, 160), "tone": "mono"},
                freed,
                formatting.plain(text(item.get("text")), 600),
            ]
        )
    return {"title": "How to free memory", **table(["change", "frees", ""], rows, numbers=" n")} if rows else None


def planned(run: RunHistory, results: Results) -> Table | None:
    """What the run expected of itself beside what it needed."""
    expected = mapping(mapping(run.facts.plan).get("expected"))
    memory = mapping(expected.get("memory"))
    on_gpu = results.gpu_peak is not None
    peak = results.gpu_peak or (results.host_peak if expected.get("coarse") is True else None)
    lines = [
        (
            "peak memory in tensors" if on_gpu else "peak memory of a process",
            number(memory.get("allocated" if on_gpu else "total")),
            peak[1] if peak is not None else None,
            formatting.memory,
        ),
        ("step time, median", number(expected.get("step_seconds")), results.step_seconds, formatting.seconds),
        ("tokens/s", number(expected.get("tokens_per_second")), results.tokens_per_second, formatting.short),
    ]
    rows: list[list[Cell]] = [
        [name, form(plan), form(actual), f"{100 * (actual / plan - 1):+.1f} %"]
        for name, plan, actual, form in lines
        if plan and actual is not None
    ]
    if not rows:
        return None
    notes = {"estimated": "Activations were estimated: this architecture is not in the table of `shardtune plan`."}
    note = notes.get(text(expected.get("known_by")), "")
    note += " The GPU's speed is from a data sheet." if expected.get("measured") is False else ""
    note = "Plans for a CPU are coarse: an order of magnitude." if expected.get("coarse") is True else note.strip()
    return table(["", "planned", "actual", "difference"], rows, numbers=" nnn", note=note)


def metrics(results: Results) -> Table | None:
    """What a script logged, by name."""
    if not results.metrics:
        return None
    rows: list[list[Cell]] = [
        [formatting.plain(one.name, 120), *(_point(at) for at in (one.first, one.last, one.lowest, one.highest))]
        for one in results.metrics
    ]
    return table(["metric", "first", "last", "min", "max"], rows, numbers=" nnnn")


def _point(at: tuple[int, float] | None) -> str:
    return f"{formatting.value(at[1])} (step {at[0]:,})" if at is not None else ""


def logs(run: RunHistory, results: Results) -> list[dict[str, str]]:
    """The last lines of the rank that failed, of a run that failed; where it is not known which, of the first ranks."""
    if results.status.state != "failed":
        return []
    ending = run.facts.ending or {"event": "run_end"}
    failed = run.failure.rank if run.failure is not None else None
    if failed is None and ending["event"] != "run_end":
        failed = whole(ending.get("rank"))
    files = log_files(run.folder)
    shown = [files[failed]] if failed is not None and failed in files else list(files.values())[:_MOST_LOGS]
    return [{"file": f"{LOGS}/{path.name}", "lines": lines} for path in shown if (lines := last_lines(path))]


def data(run: RunHistory) -> Table | None:
    event = run.facts.data
    if event is None:
        return None
    parts = {name: mapping(event.get(name)) for name in ("train", "validation") if event.get(name)}
    labels = {
        "read": "rows read", "rows": "rows trained on", "tokens": "tokens", "supervised": "supervised tokens",
        "cut": "truncated to max_length", "split": "split into several", "dropped_long": "too long, dropped",
        "dropped_short": "empty, dropped", "dropped_unsupervised": "no supervised token, dropped",
        "skipped_errors": "unreadable, skipped", "duplicates": "duplicates", "without_eos": "without an EOS token",
    }  # fmt: skip
    rows: list[list[Cell]] = []
    for key, label in labels.items():
        values = [whole(part.get(key)) for part in parts.values()]
        if any(values):
            rows.append([label, *(f"{value:,}" if value is not None else "" for value in values)])
    form = mapping(event.get("format"))
    note = f"Format {text(form.get('name'))}: {text(form.get('why'))}" if form.get("name") else ""
    return table(["", *parts], rows, numbers=" nn", note=formatting.plain(note, 600))


def adapters(run: RunHistory) -> Table | None:
    found = mapping(mapping(run.facts.plan).get("adapters"))
    base, active = number(found.get("base")) or 0.0, number(found.get("active")) or 0.0
    routed = active != base  # experts that a token does not visit
    rows: list[list[Cell]] = []
    for part in listed(found.get("rows")):
        row = mapping(part)
        places = [(whole(row.get(key)) or 0, word) for key, word in (("modules", "module"), ("tensors", "tensor"))]
        adapted = ", ".join(formatting.count(number_of, word) for number_of, word in places if number_of)
        rows.append(
            [
                {"text": formatting.plain(row.get("pattern", ""), 300), "tone": "mono"},
                adapted,
                f"{whole(row.get('parameters')) or 0:,}",
                _share(row.get("covers"), base),
                *([_share(row.get("covers_active"), active)] if routed else []),
            ]
        )
    if not rows:
        return None
    trainable, total = whole(found.get("trainable")), whole(found.get("total"))
    note = f"{trainable:,} of {total:,} parameters train ({_share(trainable, total)})." if trainable and total else ""
    note += " Covered: the share of the model's weights that have an adapter or are trained in full" + (
        ", of all weights and of those active per token." if routed else "."
    )
    proof = run.facts.proof
    if proof is not None and proof.get("ok") is True:
        note += f" Checked at step {proof.get('step')}: adapters got gradients and changed, frozen weights did not."
    heads = [
        "target",
        "adapters on",
        "trainable parameters",
        "weights covered",
        *(["active covered"] if routed else []),
    ]
    return table(heads, rows, numbers="  nnn", note=note)


def _share(part: object, whole_: float) -> str:
    value = number(part)
    return formatting.percent(value / whole_) if value is not None and whole_ else ""


def samples(run: RunHistory) -> list[dict[str, str]]:
    """Answers before and after training, by row, in the order of generation."""
    found: dict[str, dict[str, str]] = {}
    for event in run.facts.samples:
        row = formatting.plain(event.get("row", ""), 100)
        entry = found.setdefault(row, {"row": row})
        for name in ("prompt", "expected"):
            if isinstance(event.get(name), str):
                entry[name] = formatting.plain(event[name])
        if event.get("when") in ("before", "after"):
            entry[event["when"]] = formatting.plain(text(event.get("answer")))
    return list(found.values())[:_MOST_SAMPLES]


def environment(run: RunHistory) -> list[dict[str, Any]]:
    """Named groups of (name, value), from environment.json, or else the last start, and the hardware events."""
    started = dict(mapping(run.facts.starts[-1].get("environment"))) if run.facts.starts else {}
    recorded = read_json(run.folder / "environment.json") or started
    software: dict[str, Any] = {key: recorded.pop(key) for key in ("python", "packages") if key in recorded}
    packages = mapping(software.pop("packages", None))
    found: list[tuple[str, dict[str, Any]]] = [("Software", {**packages, **software})]
    machines: dict[str, list[int]] = {}
    for rank, event in sorted(run.facts.hardware.items()):
        body = {key: value for key, value in event.items() if key not in (*_OF_EVENT, "python", "packages")}
        machines.setdefault(json.dumps(body, sort_keys=True), []).append(rank)
    if not machines and recorded:
        found.append(("Machine", recorded))
    found += [(f"Machine of rank {spans(set(of))}", json.loads(body)) for body, of in list(machines.items())[:8]]
    groups = [{"title": title, "pairs": _flat(body)[:_MOST_ROWS]} for title, body in found]
    return [group for group in groups if group["pairs"]]


def _flat(value: Any, name: str = "", depth: int = 0) -> list[tuple[str, str]]:
    if isinstance(value, dict) and depth < 4:
        return [pair for key, item in value.items() for pair in _flat(item, f"{name} {key}".strip(), depth + 1)]
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value) and depth < 4:
        return [pair for i, item in enumerate(value) for pair in _flat(item, f"{name} {i}".strip(), depth + 1)]
    if value is None or value in ([], {}, ""):
        return []
    if isinstance(value, int) and value > 1 << 20 and name.rpartition(" ")[2].removesuffix("_bytes") in _SIZES:
        shown = formatting.memory(value)
    elif isinstance(value, list):
        shown = ", ".join(map(str, value))
    else:
        shown = value if isinstance(value, str) else json.dumps(value)
    return [(formatting.plain(name.replace("_", " "), 80), formatting.plain(shown, 400))]
