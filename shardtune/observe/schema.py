"""What is in an event? Every event and field of `events-rank<N>.jsonl`, as data; docs/events.md is generated from it.

python -m shardtune.observe.schema > docs/events.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from shardtune.observe.events import VERSION

Kind = Literal["integer", "number", "text", "flag", "list", "object", "any"]
Dimension = Literal["shard", "replicate", "other"]  # of the mesh, in which a collective sends
DIMENSIONS: tuple[Dimension, ...] = ("shard", "replicate", "other")
_NON_FINITE = ("nan", "inf", "-inf")  # numbers that JSON cannot represent
_NOTHING: Mapping[str, Field] = MappingProxyType({})


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        optional: Absent where it is not known or does not apply.
        null: May be null instead of absent (as in version 1).
        fields: Fields of an object; any if empty.
        items: The kind of each item of a list, or of each value of an object whose keys are not fixed.
    """

    kind: Kind
    description: str
    optional: bool = False
    null: bool = False
    fields: Mapping[str, Field] = field(default_factory=lambda: _NOTHING)
    items: Kind = "any"


@dataclass(frozen=True)
class Event:
    """Args:
    who: Which ranks write it, and when.
    is_open: May have fields that are not listed.
    """

    description: str
    who: str
    fields: Mapping[str, Field]
    is_open: bool = False


def problems(record: Mapping[str, object]) -> list[str]:
    """How an event violates the schema; empty if it does not."""
    head = _problems_of(record, ENVELOPE, "", is_open=True)
    event = EVENTS.get(str(record.get("event")))
    if event is None:
        return [*head, f"there is no event {record.get('event')!r}"]
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
            found.append(f"{path}{name} is not of kind {known.kind}: {value!r}")
        elif isinstance(value, Mapping) and known.fields:
            found += _problems_of(value, known.fields, f"{path}{name}.")
        elif isinstance(value, list | Mapping) and any(not _fits(item, known.items) for item in _items(value)):
            found.append(f"{path}{name} has items other than {known.items}s: {value!r}")
        elif isinstance(value, list) and known.fields:
            found += [p for item in value for p in _problems_of(item, known.fields, f"{path}{name}[].")]
    return found


def _items(value: list[object] | Mapping[str, object]) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value


def _fits(value: object, kind: Kind) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NON_FINITE
    types = {"text": str, "flag": bool, "list": list, "object": Mapping, "any": object}
    return isinstance(value, types[kind])


_STEP = Field("integer", "Optimizer steps completed")
_TEXT = Field("text", "Human-readable message")
_ABOUT = Field("text", "Topic, one word")

ENVELOPE: Mapping[str, Field] = {
    "v": Field("integer", f"Schema version; currently {VERSION}"),
    "time": Field("number", "When it was written, Unix seconds"),
    "rank": Field("integer", "The rank that wrote it"),
    "event": Field("text", "Name of the event"),
}

_SECONDS = {
    "step": Field("number", "From the end of the previous step to the end of this one, without evaluation and saving"),
    "data": Field("number", "Waiting for batches", optional=True),
    "forward": Field("number", "Forward passes of all micro-batches", optional=True),
    "backward": Field("number", "Backward passes, including recomputation", optional=True),
    "optimizer": Field("number", "Gradient clipping and optimizer step", optional=True),
    "collective": Field("number", "Waiting for other ranks; not included in the other phases", optional=True),
}
_TOKENS = {
    "supervised": Field("integer", "Tokens that contribute to the loss"),
    "real": Field("integer", "Tokens of documents, without padding"),
    "padded": Field("integer", "Padding tokens"),
}
_SENT = {
    "shard": Field("integer", "Weights gathered and gradients scattered among the ranks of a replica"),
    "replicate": Field("integer", "Gradients reduced over replicas"),
    "other": Field("integer", "All other collectives: token counts, gradient norm, flags"),
}
_MEMORY = {
    "allocated": Field("integer", "Bytes allocated to tensors at the end of the step"),
    "reserved": Field("integer", "Bytes reserved by the allocator"),
    "peak": Field("integer", "Peak bytes allocated to tensors so far"),
}
_HOST = {
    "rss": Field("integer", "Resident bytes", optional=True),
    "cpu_percent": Field("number", "Since the previous step; 100 is one core", optional=True),
}
_HOST_SINCE = _HOST | {
    "cpu_percent": Field("number", "Since the previous `usage`; 100 is one core", optional=True),
}
_GPU = {
    "utilization": Field("integer", "Percentage of time in which a kernel ran", optional=True),
    "sm_clock_mhz": Field("integer", "SM clock", optional=True),
    "power_watts": Field("number", "Power draw", optional=True),
    "temperature_c": Field("integer", "GPU temperature", optional=True),
    "throttle": Field("list", "Active throttle reasons", optional=True, items="text"),
    "memory_used": Field("integer", "Bytes in use on the whole device, by any process", optional=True),
}
_EXPECTED = {
    "memory": Field(
        "object", "Bytes at the peak of a step, by part; `allocated` of them in tensors, `total` with CUDA's own"
    ),
    "known_by": Field("text", "How activations are known: table, traced or estimated"),
    "coarse": Field("flag", "An order of magnitude only: on a CPU"),
    "step_seconds": Field(
        "number", "Of an optimizer step; absent for a GPU that is not in the catalogue", optional=True
    ),
    "tokens_per_second": Field("number", "Real tokens of all ranks", optional=True),
    "measured": Field("flag", "The GPU's rates were measured, not taken from a data sheet", optional=True),
}
_ADVICE = {
    "setting": Field("text", "Config key"),
    "value": Field("text", "Suggested value"),
    "frees": Field("integer", "Estimated bytes that it frees"),
    "text": Field("text", "Explanation"),
}
# The same rows are in the same group in every evaluation, on any number of ranks: what groups differ by is the noise.
_EVAL_GROUPS = {
    "tokens": Field("list", "Supervised tokens of each group", items="integer"),
    "loss": Field("list", "Mean per supervised token of each group", items="number"),
    "entropy": Field("list", "Mean entropy of each group", items="number"),
    "token_accuracy": Field("list", "Share of each group", items="number"),
}

EVENTS: Mapping[str, Event] = {
    "run_start": Event("A process of the run starts; written again on resume.", "every rank", {
        "run": Field("text", "Name of the run's folder"),
        "world_size": Field("integer", "Number of ranks"),
        "environment": Field("object", "Library versions, host, GPUs"),
        "command": Field("text", "Command line of the process, without secrets", optional=True),
        "model": Field("text", "Standalone profiler only: name or folder of the model", optional=True),
        "meta": Field("object", "Standalone profiler only: its `report_meta`", optional=True),
        "script": Field(
            "text",
            "`shardtune run`: `train.py` or `-m package.module`; standalone profiler: its `script_name`",
            optional=True,
        ),
        "seq_len": Field("integer", "Standalone profiler only: its `seq_len`", optional=True),
    }),
    "hardware": Event(
        "The machine: what `shardtune env --json` prints.", "every rank or one per node, at the start", {}, True
    ),
    "data": Event("The data is prepared.", "every rank", {
        "format": Field("object", "Detected format of the rows, and why"),
        "folder": Field("text", "Folder of the prepared rows"),
        "train": Field("object", "Counts of training rows: read, kept, dropped, tokens, …"),
        "validation": Field("object", "The same for validation rows; null without any", null=True),
    }),
    "notice": Event("A choice or interpretation that may be unexpected.", "the rank it concerns", {
        "about": _ABOUT, "text": _TEXT,
    }),
    "warning": Event("Something is probably wrong; the run continues.", "the rank it concerns", {
        "about": _ABOUT, "text": _TEXT,
    }),
    "plan": Event("The plan of the run, before the weights are read.", "every rank", {
        "math": Field("object", "Batch size, epochs and steps"),
        "adapters": Field("object", "Trained parameters, by target module"),
        "sharding": Field("object", "FSDP units, and what this rank holds"),
        "expected": Field("object", "What `shardtune plan` predicts for this rank", optional=True, fields=_EXPECTED),
    }),
    "weights": Event("The weights are loaded.", "every rank", {
        "strategy": Field("text", "Which ranks read the weights, and how the others get them"),
        "bytes_read": Field("integer", "Bytes read by this rank"),
        "seconds": Field("number", "Loading time"),
        "local_bytes": Field("integer", "Bytes of parameters on this rank"),
        "peak_host_bytes": Field("integer", "Peak resident memory of the process"),
        "readers": Field("integer", "Ranks that divided the reading of this rank's weights; 1 = it read all of them"),
        "bytes_received": Field("integer", "Bytes received from those ranks"),
        "disk_rate": Field("number", "Bytes per second of the slowest node's disk, if measured", null=True),
        "link_rate": Field("number", "Bytes per second of a broadcast between replicas, if measured", null=True),
        "quantisation_error": Field("number", "If weights were quantised while loading", null=True),
        "worst_quantised": Field("text", "The parameter with the largest error; empty if none"),
    }),
    "resume": Event("The run resumes from a checkpoint.", "every rank", {
        "step": _STEP,
        "path": Field("text", "Folder of the checkpoint"),
        "world_size": Field("integer", "Current number of ranks"),
        "random_state": Field("text", "Restored, or why not; absent for a script: it restores its own", optional=True),
        "changes": Field("list", "Settings that were changed", items="text"),
        "damaged": Field("list", "Damaged checkpoints that were skipped", items="text"),
    }),
    "step": Event("Training metrics, every `train.logging_steps` steps.", "every rank", {
        "step": _STEP,
        "epoch": Field("number", "Epochs completed, fractional", null=True),
        "loss": Field("number", "Mean per supervised token since the previous `step` event"),
        "grad_norm": Field("number", "Norm of all gradients, before clipping", optional=True, null=True),
        "entropy": Field("number", "Mean entropy of the predictions of supervised tokens, in nats", optional=True),
        "token_accuracy": Field("number", "Share of supervised tokens that were the likeliest one", optional=True),
        "learning_rate": Field("number", "Learning rate of the step", optional=True, null=True),
        "tokens": Field("integer", "Real tokens of all ranks so far", optional=True),
        "tokens_per_second": Field("number", "Real tokens of all ranks since the previous `step`", optional=True),
    }),
    "metrics": Event(
        "Numbers that a script logs with `observe.log`; names are the script's own, such as `loss` or `val/mAP@50`.",
        "every rank that calls it; where several do, readers take the lowest rank's",
        {
            "step": _STEP,
            "values": Field("object", "Number by name", items="number"),
        },
    ),
    "profile": Event("Profile of a step (docs/profiling.md).", "every rank, every step; on a GPU slightly later", {
        "step": _STEP,
        "seconds": Field("object", "Time by phase; phases do not overlap", fields=_SECONDS),
        "tokens": Field("object", "Tokens of this rank in this step", optional=True, fields=_TOKENS),
        "tokens_per_second": Field("number", "Real tokens of this rank over `seconds.step`", optional=True),
        "samples": Field("integer", "Script only: samples of this rank in this step", optional=True),
        "samples_per_second": Field("number", "Script only: `samples` over `seconds.step`", optional=True),
        "sample_unit": Field("text", "Script only: what a sample is, in the plural, such as images", optional=True),
        "tflops": Field("number", "TFLOP/s of this rank, counting only what the training needs", optional=True),
        "hardware_tflops": Field("number", "TFLOP/s executed, with padding and recomputation", optional=True),
        "mfu": Field("number", "`tflops` over the chip's dense bf16 peak", optional=True),
        "hfu": Field("number", "`hardware_tflops` over the same", optional=True),
        "compiled": Field("integer", "Graphs compiled by torch.compile in this step; absent if none", optional=True),
        "collectives": Field(
            "object", "Bytes sent by this rank, by mesh dimension; FSDP2 on several ranks", optional=True, fields=_SENT
        ),
        "collectives_between_nodes": Field(
            "object", "The part of them that this rank sent to another node", optional=True, fields=_SENT
        ),
        "memory": Field("object", "GPU memory", optional=True, fields=_MEMORY),
        "host": Field("object", "This process on the host", optional=True, fields=_HOST),
        "gpu": Field("object", "From NVML, at most a second old", optional=True, fields=_GPU),
    }),
    "usage": Event("Load of the process and its GPU, of a script's run.", "every rank, every 10 s", {
        "host": Field("object", "This process on the host", optional=True, fields=_HOST_SINCE),
        "gpu": Field("object", "From NVML", optional=True, fields=_GPU),
    }),
    "eval": Event("An evaluation is done.", "every rank", {
        "step": _STEP,
        "loss": Field("number", "Mean per supervised token, all ranks"),
        "tokens": Field("integer", "Supervised tokens of all ranks", optional=True, null=True),
        "entropy": Field("number", "Mean entropy of the predictions of supervised tokens, in nats", optional=True),
        "token_accuracy": Field("number", "Share of supervised tokens that were the likeliest one", optional=True),
        "groups": Field("object", "The same means of up to 32 parts of the rows", optional=True, fields=_EVAL_GROUPS),
    }),
    "checkpoint": Event("A checkpoint is complete on disk.", "rank 0", {
        "step": _STEP,
        "path": Field("text", "Its folder"),
        "bytes": Field("integer", "Its size"),
        "seconds": Field("number", "How long training was blocked"),
        "background_seconds": Field("number", "Writing time in the background"),
    }),
    "checkpoint_failed": Event("A checkpoint could not be written; earlier ones are intact.", "rank 0", {
        "step": _STEP,
        "error": Field("text", "Error of the operating system"),
        "in_a_row": Field("integer", "Consecutive failures"),
        "bytes": Field("integer", "Size it would have had", optional=True),
        "seconds": Field("number", "How long training was blocked", optional=True),
    }),
    "proof": Event("Training check: adapters change, frozen weights do not.", "every rank, in the first steps", {
        "ok": Field("flag", "Whether the check passed"),
        "step": _STEP,
        "proven": Field("integer", "Adapter shards that got a gradient and changed", optional=True),
        "shards": Field("integer", "Adapter shards in total", optional=True),
        "frozen": Field("integer", "Frozen shards, none of which changed", optional=True),
        "unproven": Field("list", "Names of some shards not checked yet", optional=True, items="text"),
        "problem": Field("text", "What failed, if not ok; `rank` is then the rank where it failed", optional=True),
    }),
    "guard": Event("A guard was triggered.", "rank 0, or the rank it is about", {
        "guard": Field("text", "Its name, such as loss_spike"),
        "step": _STEP,
        "action": Field("text", "warn, skip-step, rollback or stop"),
        "text": _TEXT,
        "value": Field("number", "Measured value", optional=True),
        "limit": Field("number", "Threshold", optional=True),
        "ranks": Field("list", "Affected ranks", optional=True, items="integer"),
        "rows": Field("list", "Rows of the batch, as split:number", optional=True, items="text"),
        "to_step": Field("integer", "Target step of a rollback", optional=True),
    }),
    "out_of_memory": Event("A GPU ran out of memory; the run ends.", "the rank it happened on", {
        "phase": Field("text", "forward, backward, optimizer, evaluation, loading, …"),
        "step": Field("integer", "Current step", optional=True),
        "capacity": Field("integer", "Bytes of the device", optional=True),
        "wanted": Field("integer", "Bytes of the failed allocation", optional=True),
        "free": Field("integer", "Bytes that were free", optional=True),
        "held": Field("object", "Bytes in use, by part: weights, gathered, adapters, …"),
        "advice": Field("list", "Changes that would free memory, cheapest first", items="object", fields=_ADVICE),
    }, True),
    "score": Event("The model was scored on test rows, before or after training.", "rank 0", {
        "when": Field("text", "before or after"),
        "name": Field("text", "Name of the metric, such as exact match"),
        "value": Field("number", "The score"),
        "unit": Field("text", "Unit of the value, such as %", optional=True),
        "rows": Field("integer", "Number of test rows", optional=True),
    }),
    "sample": Event("The model answers a row, before or after training.", "rank 0", {
        "when": Field("text", "before or after"),
        "row": Field("text", "split:number"),
        "prompt": Field("text", "The prompt"),
        "answer": Field("text", "The model's answer"),
        "expected": Field("text", "The answer in the row"),
    }, True),
    "no_progress": Event("A rank exceeded its time limit and ends itself.", "that rank", {
        "doing": Field("text", "What it was doing"),
        "limit_seconds": Field("number", "The time limit"),
        "kind": Field("text", "waiting (for other ranks) or stalled (in its own work)"),
        "text": _TEXT,
        "stacks": Field("text", "File with its stacks", null=True),
    }),
    "run_failed": Event("The run ended with an error.", "every rank that still could", {
        "exit_code": Field("integer", "docs/exit-codes.md", optional=True),
        "text": _TEXT,
    }, True),
    "run_end": Event("The run has ended. Without this event it is still running, or was killed.", "every rank", {
        "status": Field("text", "done, or stopped (on request)"),
        "step": _STEP,
        "seconds": Field("number", "Training time", optional=True),
        "loss": Field("number", "Last training loss", optional=True, null=True),
        "eval_loss": Field("number", "Evaluation loss of the published adapter", optional=True, null=True),
        "adapter": Field("text", "Its folder: `final/`, or the fallback folder", optional=True),
    }),
}  # fmt: skip


_INTRODUCTION = f"""\
# Events

<!-- Generated by `python -m shardtune.observe.schema`; change shardtune/observe/schema.py instead. -->

Each rank appends to `events-rank<N>.jsonl` in the run's folder: one JSON object per line, schema version {VERSION}.
Lines are written unbuffered, as things happen: a process that dies loses at most the line it was writing, and a partial
line stays a separate line when the run resumes. Readers should skip lines that are not JSON, and events and fields that
they do not know. While the disk is full, lines are kept in memory and written later, in order and with their original
time; a `warning` about `events` reports that.

Numbers that JSON cannot represent are `"nan"`, `"inf"` or `"-inf"`. "?" marks a field that is absent where it is
not known or does not apply; "or null" one that is null in that case. Sizes are in bytes, times in seconds.

The version changes when a field changes its meaning or is removed. Version 2: `profile` is written for every step
and has other fields than in version 1 (`step_seconds`, `host_peak_bytes`, `gpu_peak_bytes`); there are new events.
Added since then, within version 2: `metrics`, `usage`, samples in `profile`, and `groups` in `eval`.

Every event has:
"""


def page() -> str:
    """docs/events.md."""
    lines = [_INTRODUCTION, *_table(ENVELOPE)]
    for name, event in EVENTS.items():
        lines += ["", f"## `{name}`", "", f"{event.description} Written by {event.who}.", ""]
        lines += _table(event.fields) if event.fields else []
        if event.is_open:
            lines += ["", "May have additional fields."] if event.fields else ["Its fields are those of the command."]
    return "\n".join(lines) + "\n"


def _table(fields: Mapping[str, Field]) -> list[str]:
    return ["| field | kind | |", "|---|---|---|", *_rows(fields, "")]


def _rows(fields: Mapping[str, Field], path: str) -> list[str]:
    found = []
    for name, known in fields.items():
        kind = f"list of {known.items}s" if known.kind == "list" and known.items != "any" else known.kind
        kind += " or null" if known.null else ""
        found.append(f"| `{path}{name}`{'?' if known.optional else ''} | {kind} | {known.description} |")
        found += _rows(known.fields, f"{path}{name}[]." if known.kind == "list" else f"{path}{name}.")
    return found


if __name__ == "__main__":
    print(page(), end="")
