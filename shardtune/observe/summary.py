"""What is about to run? The lines and the adapter table printed before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from shardtune.adapters.coverage import Coverage
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import TrainSection
    from shardtune.data.order import Documents
    from shardtune.data.prepared import PreparedCounts
    from shardtune.model.blueprint import Blueprint
    from shardtune.observe.events import EventLog
    from shardtune.parallel.processes import Processes
    from shardtune.parallel.shard import Sharding
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.weights import Loaded


def say(console: Console, label: str, text: str) -> None:
    """One labelled line of the summary; never broken by us, so that a path can be copied."""
    console.print(f"[bold]{label:<9}[/] {escape(text)}", highlight=False, soft_wrap=True)


def warn(console: Console, events: EventLog, about: str, text: str) -> None:
    """Where nobody overlooks it, and kept for reports."""
    console.print(f"[bold red]warning[/] {escape(text)}", highlight=False, soft_wrap=True)
    events.write("warning", about=about, text=text)


def data_line(counts: PreparedCounts) -> str:
    left_out = {
        "cut to max_length": counts.cut,
        "split into several": counts.split,
        "too long, dropped": counts.dropped_long,
        "empty, dropped": counts.dropped_short,
        "without a supervised token, dropped": counts.dropped_unsupervised,
        "unreadable, skipped": counts.skipped_errors,
    }
    told = "; ".join(f"{number:,} {words}" for words, number in left_out.items() if number)
    share = counts.supervised / counts.tokens
    text = f"{counts.rows:,} rows, {counts.tokens:,} tokens, {share:.0%} of them carry loss"
    return text + (f" ({told})" if told else "")


def packing_line(documents: Documents, resolved: ResolvedConfig, *, filled: bool) -> str:
    """Args:
    filled: Sequences are padded to data.max_length, so that compiled code sees one shape.
    """
    capacity = resolved.config.data.max_length
    if documents.packs is None:
        to = f"{capacity:,}: layers are compiled for one shape" if filled else "the longest of its batch"
        origin = resolved.origins.get("train.packing")
        why = f" ({origin.where})" if origin is not None and origin.source == "auto" else ""
        return f"off{why}: one row per sequence, padded to {to}"
    used = documents.packs.efficiency(documents.prepared.lengths, capacity)
    rows, sequences = len(documents.prepared), len(documents)
    return f"{rows:,} rows in {sequences:,} sequences of {capacity:,}, {used:.1%} of the places used"


def math_lines(math: TrainingMath, unit: str = "rows") -> tuple[str, str]:
    """The batch and the steps, each with how it was counted."""
    batch = (
        f"{math.per_device} per device × {count(math.processes, 'process', 'es')} × {math.accumulation} accumulation "
        f"= {math.effective_batch} {unit} a step"
    )
    steps = (
        f"{math.steps:,} ({math.epochs:.3g} epochs of {math.rows:,} {unit} / {math.effective_batch}), "
        f"{math.warmup_steps} warm-up, about {math.total_tokens:,} tokens"
    )
    return batch, steps


def sharding_line(sharding: Sharding, processes: Processes) -> str:
    return (
        f"FSDP2 over {count(processes.world_size, 'process', 'es')} on {processes.device.type}, {sharding.units} × "
        f"{sharding.layer_class}; "
        f"this rank holds {size(sharding.local_bytes)} of {size(sharding.total_bytes)}"
    )


def kernels_line(resolved: ResolvedConfig, lora: tuple[int, int], experts: tuple[int, int]) -> str:
    """Which fused code runs, and where its eager twin does, why.

    Args:
        lora: Linear layers with LoRA that compute in one operator, of how many.
        experts: Layers whose routed experts compute as grouped products, of how many.
    """
    train = resolved.config.train
    fast = [_some_of("LoRA on", *lora, "PEFT's own")] * (lora[1] > 0)
    fast += [_some_of("experts of", *experts, "transformers' own")] * (experts[0] > 0)
    fast += ["loss"] * bool(train.fused_loss) + ["compiled layers"] * bool(train.compile)
    names = {"fused_lora": "LoRA", "fused_experts": "experts", "fused_loss": "loss", "compile": "layers"}
    if not experts[1]:
        del names["fused_experts"]
    twins = []
    for key, name in names.items():
        if not getattr(train, key):
            origin = resolved.origins.get(f"train.{key}")
            why = origin.where if origin is not None and origin.source == "auto" else f"train.{key} is false"
            twins.append(f"{name} ({why})")
    told = [f"fused: {', '.join(fast)}"] if fast else []
    if twins:
        told.append(f"eager: {', '.join(twins)}")
    return "; ".join([*told, f"attention: {resolved.config.model.attn_implementation}"])


def _some_of(what: str, here: int, of: int, else_by: str) -> str:
    return f"{what} {of} layers" if here == of else f"{what} {here} of {of} layers (else {else_by})"


def recompute_line(train: TrainSection, device: str) -> str:
    """What the backward pass computes again, and where its inputs wait."""
    checkpointing = train.gradient_checkpointing
    if checkpointing == "selective":
        return "selective: results of matrix products and attention are kept, the rest of a layer is computed again"
    if checkpointing:
        place = ""
        if train.offload_activations:
            place = " in the host's memory" if device == "cuda" else f" (where it is: a {device} has no other place)"
        return f"full: of each layer its input is kept{place}, all of it is computed again in the backward pass"
    return "none: everything the backward pass needs is kept"


def weights_lines(loaded: Loaded, blueprint: Blueprint) -> list[str]:
    """What was read by this rank, how fast, and what was left where it is."""
    if loaded.way == "random":
        return [f"RANDOM, {size(loaded.local_bytes)} drawn here in {loaded.seconds:.1f} s"]
    speed = f"{size(loaded.bytes_read / max(loaded.seconds, 1e-9))}/s"
    lines = [
        f"{size(loaded.bytes_read)} read in {loaded.seconds:.1f} s ({speed}), {size(loaded.local_bytes)} held here; "
        f"host memory peaked at {size(loaded.peak_host_bytes)}"
    ]
    if loaded.way == "rank0-broadcast":
        lines[0] += "; rank 0 read for all ranks"
    if blueprint.wrapper is not None:
        other = blueprint.assembly.left_out
        lines.append(
            f"the text model out of {blueprint.wrapper.class_name}: {len(other)} other tensors "
            f"({size(sum(tensor.nbytes for tensor in other))}) not read"
        )
    if blueprint.assembly.unused_scales:
        lines.append(
            f"{count(blueprint.assembly.unused_scales, 'activation scale')} not used: activations stay in full"
        )
    if loaded.quantisation_error is not None:
        lines.append(
            f"quantised to float8 on load, one scale per row: relative error {loaded.quantisation_error:.2%} (norm of "
            f"the difference over norm of the weights), worst {loaded.worst_quantised}"
        )
    return lines


def adapter_table(coverage: Coverage) -> Table:
    """Each target: what got adapters, how much trains there, and how much of the model they sit on."""
    table = Table(
        title="What trains", title_justify="left", title_style="bold", caption=_how_counted(coverage),
        caption_justify="left",
    )  # fmt: skip
    table.add_column("target", overflow="fold")
    table.add_column("on")
    for name in ("adapter parameters", "of active", "of all"):
        table.add_column(name, justify="right")
    for row in coverage.rows:
        table.add_row(
            escape(row.pattern),
            _places(row.modules, row.tensors),
            f"{row.parameters:,}",
            f"{row.covers_active / coverage.active:.2%}",
            f"{row.covers / coverage.base:.2%}",
        )
    table.add_section()
    rows = coverage.rows
    table.add_row(
        "all trainable",
        _places(sum(row.modules for row in rows), sum(row.tensors for row in rows)),
        f"{coverage.trainable:,}",
        f"{sum(row.covers_active for row in rows) / coverage.active:.2%}",
        f"{sum(row.covers for row in rows) / coverage.base:.2%}",
    )
    return table


def _places(modules: int, tensors: int) -> str:
    parts = [count(modules, "module")] if modules or not tensors else []
    return ", ".join([*parts, *([count(tensors, "tensor")] if tensors else [])])


def _how_counted(coverage: Coverage) -> str:
    text = f"of active, of all: the share of the frozen weights that the adapters sit on, of {coverage.base:,} in all"
    if coverage.visited is None:
        return f"{text}, which every token passes."
    return (
        f"{text} and of the {round(coverage.active):,} that one token passes "
        f"({coverage.visited[0]} of {coverage.visited[1]} routed experts)."
    )


def count(number: int, word: str, plural: str = "s") -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {word}{'' if number == 1 else plural}"


def operations(tflops: float) -> str:
    """`310 TFLOP/s`; a toy on a CPU does `66.6 MFLOP/s`."""
    for unit in ("TFLOP/s", "GFLOP/s", "MFLOP/s"):
        if tflops >= 0.1 or unit == "MFLOP/s":
            break
        tflops *= 1000
    return f"{tflops:.3g} {unit}"


def size(number: float) -> str:
    """Bytes in powers of 1000, as disks and vendors number."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # three digits of more would read 1e+03
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def clock(seconds: float) -> str:
    """12 s → `0:12`, 3700 s → `1:01:40`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
