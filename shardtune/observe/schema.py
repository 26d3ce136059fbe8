"""What can an event say? Every event and field of `events-rank<N>.jsonl`, as data; docs/events.md is printed from it.

python -m shardtune.observe.schema > docs/events.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from shardtune.observe.events import VERSION

Kind = Literal["integer", "number", "text", "flag", "list", "object", "any"]
_NUMBER_WORDS = ("nan", "inf", "-inf")  # what JSON has no number for
_NOTHING: Mapping[str, Field] = MappingProxyType({})


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        optional: Absent where it is not known or means nothing.
        null: May be null instead of absent (events of version 1 had it so).
        fields: What an object holds; any fields if empty.
        items: The kind of each item of a list.
    """

    kind: Kind
    words: str
    optional: bool = False
    null: bool = False
    fields: Mapping[str, Field] = field(default_factory=lambda: _NOTHING)
    items: Kind = "any"


@dataclass(frozen=True)
class Event:
    """Args:
    who: Which ranks write it, and when.
    is_open: May hold fields that are not listed.
    """

    words: str
    who: str
    fields: Mapping[str, Field]
    is_open: bool = False


def problems(record: Mapping[str, object]) -> list[str]:
    """What about an event is not as written here; empty if all is."""
    head = _problems_of(record, ENVELOPE, "", is_open=True)
    event = EVENTS.get(str(record.get("event")))
    if event is None:
        return [*head, f"no event is called {record.get('event')!r}"]
    rest = {name: value for name, value in record.items() if name not in ENVELOPE}
    return head + _problems_of(rest, event.fields, f"{record['event']}.", is_open=event.is_open)


def _problems_of(
    values: Mapping[str, object], fields: Mapping[str, Field], path: str, *, is_open: bool = False
) -> list[str]:
    found = [f"{path}{name} is missing" for name, known in fields.items() if name not in values and not known.optional]
    for name, value in values.items():
        known = fields.get(name)
        if known is None:
            found += [] if is_open else [f"{path}{name} is not in the schema"]
        elif value is None:
            found += [] if known.null or known.kind == "any" else [f"{path}{name} is null"]
        elif not _fits(value, known.kind):
            found.append(f"{path}{name} is no {known.kind}: {value!r}")
        elif isinstance(value, Mapping) and known.fields:
            found += _problems_of(value, known.fields, f"{path}{name}.")
        elif isinstance(value, list) and any(not _fits(item, known.items) for item in value):
            found.append(f"{path}{name} holds more than {known.items}s: {value!r}")
        elif isinstance(value, list) and known.fields:
            found += [p for item in value for p in _problems_of(item, known.fields, f"{path}{name}[].")]
    return found


def _fits(value: object, kind: Kind) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NUMBER_WORDS
    types = {"text": str, "flag": bool, "list": list, "object": Mapping, "any": object}
    return isinstance(value, types[kind])


_STEP = Field("integer", "Optimizer steps done when it happened")
_TEXT = Field("text", "A sentence for people")
_ABOUT = Field("text", "What it concerns, in a word")

ENVELOPE: Mapping[str, Field] = {
    "v": Field("integer", f"Version of this schema; {VERSION} now"),
    "time": Field("number", "When it was written, Unix seconds"),
    "rank": Field("integer", "Who wrote it"),
    "event": Field("text", "Its name, below"),
}

_SECONDS = {
    "step": Field("number", "From the end of the step before to the end of this one; no evaluation, no saving"),
    "data": Field("number", "The device waited for batches", optional=True),
    "forward": Field("number", "Forward passes of all micro-batches", optional=True),
    "backward": Field("number", "Backward passes, recomputation in them", optional=True),
    "optimizer": Field("number", "Clipping and the optimizer's step", optional=True),
    "collective": Field("number", "Waiting for other ranks; in none of the other phases", optional=True),
}
_TOKENS = {
    "supervised": Field("integer", "Tokens that enter the loss"),
    "real": Field("integer", "Tokens of documents"),
    "padded": Field("integer", "Padding, computed and not used"),
}
_MEMORY = {
    "allocated": Field("integer", "Bytes in tensors when the step ended"),
    "reserved": Field("integer", "Bytes the allocator held"),
    "peak": Field("integer", "Most bytes ever in tensors, so far"),
}
_HOST = {
    "rss": Field("integer", "Bytes resident", optional=True),
    "cpu_percent": Field("number", "Since the last step; 100 is one core", optional=True),
}
_GPU = {
    "utilization": Field("integer", "Percent of the time a kernel ran", optional=True),
    "sm_clock_mhz": Field("integer", "Clock of the multiprocessors", optional=True),
    "power_watts": Field("number", "Drawn", optional=True),
    "temperature_c": Field("integer", "Of the chip", optional=True),
    "throttle": Field("list", "What slows the clock down, by name", optional=True, items="text"),
}
_ADVICE = {
    "setting": Field("text", "Key in the config"),
    "value": Field("text", "What to set it to"),
    "frees": Field("integer", "Bytes it would free, about"),
    "text": Field("text", "The same in words"),
}

EVENTS: Mapping[str, Event] = {
    "run_start": Event("A process of the run begins; again when it goes on.", "every rank", {
        "run": Field("text", "Name of the run's folder"),
        "world_size": Field("integer", "Ranks"),
        "environment": Field("object", "Versions of libraries, host, GPUs"),
        "command": Field("text", "The command line of the process, without secrets", optional=True),
        "model": Field("text", "Of a profiler that was used alone: name or folder of the model", optional=True),
        "meta": Field("object", "Its `report_meta`", optional=True),
        "script": Field("text", "Its `script_name`", optional=True),
        "seq_len": Field("integer", "Its `seq_len`", optional=True),
    }),
    "hardware": Event(
        "The machine under it: what `shardtune env --json` prints.", "every rank or one of a node, at start", {}, True
    ),
    "data": Event("The data is prepared.", "every rank", {
        "format": Field("object", "What the rows are taken for, and why"),
        "folder": Field("text", "Where the prepared rows lie"),
        "train": Field("object", "What became of the rows"),
        "validation": Field("object", "Likewise; null without validation rows", null=True),
    }),
    "notice": Event("An interpretation or a choice that one might not expect.", "the rank it concerns", {
        "about": _ABOUT, "text": _TEXT,
    }),
    "warning": Event("Something is likely wrong, and the run goes on.", "the rank it concerns", {
        "about": _ABOUT, "text": _TEXT,
    }),
    "plan": Event("All is settled before the weights are read.", "every rank", {
        "math": Field("object", "Batch, epochs and steps"),
        "adapters": Field("object", "What trains, target by target"),
        "sharding": Field("object", "What is one unit, and what this rank holds"),
    }),
    "weights": Event("The weights are in place.", "every rank", {
        "way": Field("text", "Who reads for whom"),
        "bytes_read": Field("integer", "By this rank"),
        "seconds": Field("number", "It took"),
        "local_bytes": Field("integer", "Of parameters this rank holds"),
        "peak_host_bytes": Field("integer", "Most memory the process had held"),
        "quantisation_error": Field("number", "Where weights were quantised on load", null=True),
        "worst_quantised": Field("text", "The parameter with the largest error; empty without"),
    }),
    "resume": Event("The run goes on from a checkpoint.", "every rank", {
        "step": _STEP,
        "path": Field("text", "Of the checkpoint"),
        "world_size": Field("integer", "Ranks now"),
        "random_state": Field("text", "Restored, or why not"),
        "changes": Field("list", "Settings that differ from before", items="text"),
        "damaged": Field("list", "Checkpoints that were set aside", items="text"),
    }),
    "step": Event("A line of the log, every `train.logging_steps` steps.", "every rank", {
        "step": _STEP,
        "epoch": Field("number", "Passes over the data", null=True),
        "loss": Field("number", "Mean per supervised token since the last such event"),
        "grad_norm": Field("number", "Of all adapters, before clipping", optional=True, null=True),
        "learning_rate": Field("number", "Of the step", optional=True, null=True),
        "tokens": Field("integer", "Real tokens of all ranks so far", optional=True),
        "tokens_per_second": Field("number", "Of all ranks since the last such event", optional=True),
    }),
    "profile": Event("What a step cost (docs/profiling.md).", "every rank, every step; on a GPU a little later", {
        "step": _STEP,
        "seconds": Field("object", "Phases, which do not overlap", fields=_SECONDS),
        "tokens": Field("object", "Of this rank in this step", optional=True, fields=_TOKENS),
        "tokens_per_second": Field("number", "Real tokens of this rank over `seconds.step`", optional=True),
        "tflops": Field("number", "Operations the training asks for, 10¹² a second, this rank", optional=True),
        "hardware_tflops": Field("number", "Those executed: padding and recomputation too", optional=True),
        "mfu": Field("number", "`tflops` over the chip's dense bf16 peak", optional=True),
        "hfu": Field("number", "`hardware_tflops` over the same", optional=True),
        "compiled": Field("integer", "Graphs that torch.compile made in it; absent if none", optional=True),
        "memory": Field("object", "On the GPU", optional=True, fields=_MEMORY),
        "host": Field("object", "This process", optional=True, fields=_HOST),
        "gpu": Field("object", "From NVML, at most a second old", optional=True, fields=_GPU),
    }),
    "eval": Event("An evaluation is over.", "every rank", {
        "step": _STEP,
        "loss": Field("number", "Per supervised token over all ranks"),
        "tokens": Field("integer", "Supervised tokens of all ranks", optional=True, null=True),
    }),
    "checkpoint": Event("A checkpoint is complete on the disk.", "rank 0", {
        "step": _STEP,
        "path": Field("text", "Its folder"),
        "bytes": Field("integer", "Its size"),
        "seconds": Field("number", "Training waited"),
        "background_seconds": Field("number", "Written beside the training"),
    }),
    "checkpoint_failed": Event("A checkpoint could not be written; those before are good.", "rank 0", {
        "step": _STEP,
        "error": Field("text", "What the system said"),
        "in_a_row": Field("integer", "Failures since the last good one"),
        "bytes": Field("integer", "It would have had", optional=True),
        "seconds": Field("number", "Training waited", optional=True),
    }),
    "proof": Event("Checked: adapters change, frozen weights do not.", "every rank, in the first steps", {
        "ok": Field("flag", "They do"),
        "step": _STEP,
        "proven": Field("integer", "Adapter shards that got a gradient and changed", optional=True),
        "shards": Field("integer", "Of so many", optional=True),
        "frozen": Field("integer", "Shards that must not change, and did not", optional=True),
        "unproven": Field("list", "Names of some that still wait", optional=True, items="text"),
        "problem": Field("text", "What was found, if not ok; `rank` is then the rank it was found on", optional=True),
    }),
    "guard": Event("A guard saw trouble.", "rank 0, or the rank it is about", {
        "guard": Field("text", "Which one, such as loss_spike"),
        "step": _STEP,
        "action": Field("text", "warn, skip-step, rollback or stop"),
        "text": _TEXT,
        "value": Field("number", "What was measured", optional=True),
        "limit": Field("number", "What it was compared with", optional=True),
        "ranks": Field("list", "Where", optional=True, items="integer"),
        "rows": Field("list", "Rows of the batch, as split:number", optional=True, items="text"),
        "to_step": Field("integer", "Of a rollback", optional=True),
    }),
    "out_of_memory": Event("A GPU's memory was not enough; the run ends.", "the rank it happened to", {
        "phase": Field("text", "forward, backward, optimizer, evaluation, loading, …"),
        "step": Field("integer", "The step under way", optional=True),
        "capacity": Field("integer", "Bytes of the device", optional=True),
        "wanted": Field("integer", "Bytes that could not be had", optional=True),
        "free": Field("integer", "Bytes that were free", optional=True),
        "held": Field("object", "Bytes by what held them: weights, gathered, adapters, …"),
        "advice": Field("list", "Changes that would free enough, cheapest first", items="object", fields=_ADVICE),
    }, True),
    "score": Event("The model was scored on test rows, before or after training.", "rank 0", {
        "when": Field("text", "before or after"),
        "name": Field("text", "What was counted, such as exact match"),
        "value": Field("number", "The score"),
        "unit": Field("text", "Behind the value, such as %", optional=True),
        "rows": Field("integer", "Test rows", optional=True),
    }),
    "sample": Event("The model answers a row, before or after training.", "rank 0", {
        "when": Field("text", "before or after"),
        "row": Field("text", "split:number"),
        "prompt": Field("text", "What it was asked"),
        "answer": Field("text", "What it answered"),
        "expected": Field("text", "What the row says"),
    }, True),
    "no_progress": Event("A rank hung longer than it may; it ends itself.", "that rank", {
        "doing": Field("text", "What it was at"),
        "limit_seconds": Field("number", "It was given"),
        "kind": Field("text", "waiting (for others) or stalled (by itself)"),
        "text": _TEXT,
        "stacks": Field("text", "File with its stacks", null=True),
    }),
    "run_failed": Event("The run ended with an error.", "whoever could still write", {
        "exit_code": Field("integer", "docs/exit-codes.md", optional=True),
        "text": _TEXT,
    }, True),
    "run_end": Event("The run is over. A run without it ended otherwise, or goes on.", "every rank", {
        "status": Field("text", "done, or stopped (on request)"),
        "step": _STEP,
        "seconds": Field("number", "Training took", optional=True),
        "loss": Field("number", "The last one", optional=True, null=True),
        "eval_loss": Field("number", "Of the adapter that was kept", optional=True, null=True),
        "adapter": Field("text", "Its folder: `final/`, or where there was room for it", optional=True),
    }),
}  # fmt: skip


_INTRODUCTION = f"""\
# Events

<!-- Printed by `python -m shardtune.observe.schema`; change shardtune/observe/schema.py instead. -->

Each rank appends to `events-rank<N>.jsonl` in the run's folder: one JSON object per line, schema version {VERSION}.
A line is handed to the system whole, when the thing happens: a process that dies loses at most the line it was writing,
and a half-written line stays a line of its own when the run goes on. Readers skip a line that is not JSON, and events
and fields they do not know. While the disk is full lines wait in memory and follow in order, with the time they had;
then a `warning` about `events` says so.

A number JSON cannot write is `"nan"`, `"inf"` or `"-inf"`. "?" marks a field that is absent where it is not known or
means nothing; "or null" one that is null then. Sizes are bytes, times seconds.

A version changes when a field changes its meaning or goes away. Version 2: `profile` comes for every step and has other
fields than in version 1 (`step_seconds`, `host_peak_bytes`, `gpu_peak_bytes`); new events.

Every event has:
"""


def page() -> str:
    """docs/events.md."""
    lines = [_INTRODUCTION, *_table(ENVELOPE)]
    for name, event in EVENTS.items():
        lines += ["", f"## `{name}`", "", f"{event.words} Written by {event.who}.", ""]
        lines += _table(event.fields) if event.fields else []
        if event.is_open:
            lines += ["", "May have more fields."] if event.fields else ["Its fields are those of the command."]
    return "\n".join(lines) + "\n"


def _table(fields: Mapping[str, Field]) -> list[str]:
    return ["| field | kind | |", "|---|---|---|", *_rows(fields, "")]


def _rows(fields: Mapping[str, Field], path: str) -> list[str]:
    found = []
    for name, known in fields.items():
        kind = f"list of {known.items}s" if known.kind == "list" and known.items != "any" else known.kind
        kind += " or null" if known.null else ""
        found.append(f"| `{path}{name}`{'?' if known.optional else ''} | {kind} | {known.words} |")
        found += _rows(known.fields, f"{path}{name}[]." if known.kind == "list" else f"{path}{name}.")
    return found


if __name__ == "__main__":
    print(page(), end="")
