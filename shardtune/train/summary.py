"""What is about to run? The lines and the adapter table printed before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from shardtune.plan.traffic import traffic_sentence
from shardtune.terminal import count, percent, size

if TYPE_CHECKING:
    from shardtune.adapters.coverage import Coverage
    from shardtune.config.schema import TrainSection
    from shardtune.data.prepared import PreparedCounts
    from shardtune.model.meta_model import MetaModel
    from shardtune.parallel.mesh import Mesh
    from shardtune.parallel.processes import Processes
    from shardtune.parallel.shard import Sharding
    from shardtune.plan.resolve import ResolvedRun
    from shardtune.train.build import Fused
    from shardtune.train.context import Data
    from shardtune.train.traffic import Traffic
    from shardtune.train.weights import LoadStats


def data_line(counts: PreparedCounts) -> str:
    left_out = {
        "cut to max_length": counts.cut,
        "split into several": counts.split,
        "too long, dropped": counts.dropped_long,
        "empty, dropped": counts.dropped_short,
        "without a supervised token, dropped": counts.dropped_unsupervised,
        "unreadable, skipped": counts.skipped_errors,
    }
    dropped = "; ".join(f"{number:,} {words}" for words, number in left_out.items() if number)
    share = counts.supervised / counts.tokens
    text = (
        f"{count(counts.rows, 'row')}, {counts.tokens:,} tokens, {counts.supervised:,} supervised ({100 * share:.0f} %)"
    )
    return text + (f" ({dropped})" if dropped else "")


def packing_line(data: Data, run: ResolvedRun) -> str:
    documents, capacity = data.train, run.config.data.max_length
    if documents.packs is None:
        one_shape = data.collator.fill_to is not None
        to = f"{capacity:,}: layers are compiled for one shape" if one_shape else "the longest of its batch"
        why = run.reason("train.packing")
        return f"off{f' ({why})' if why is not None else ''}: one row per sequence, padded to {to}"
    used = documents.packs.efficiency(documents.prepared.lengths, capacity)
    rows, sequences = len(documents.prepared), len(documents)
    return f"{count(rows, 'row')} in {count(sequences, 'sequence')} of {capacity:,}, {percent(used)} full"


def sharding_line(sharding: Sharding, processes: Processes, run: ResolvedRun) -> str:
    """Who holds what, and where that was chosen here, why."""
    mesh, device = sharding.mesh, processes.device.type
    units = f"{sharding.units} × {sharding.layer_class}"
    if mesh.size == 1:
        how = f"one process on {device}, {units}"
    elif mesh.shards == 1:
        how = f"replicate: the whole base on each of {mesh.size} processes on {device}"
    elif mesh.replicas == 1:
        how = f"FSDP2 over {mesh.size} processes on {device}, {units}"
    else:
        how = f"hybrid: {mesh.replicas} replicas of the base, each over {mesh.shards} processes on {device}, {units}"
    text = f"{how}; this rank holds {size(sharding.local_bytes)} of {size(sharding.total_bytes)}"
    why = run.reason("parallel.shard") if mesh.size > 1 else None
    return f"{text} ({why})" if why is not None else text


def traffic_line(traffic: Traffic, mesh: Mesh) -> str | None:
    """What a step sends; None where there is nobody to send to."""
    if mesh.size == 1:
        return None
    text = traffic_sentence(traffic.sent, traffic.full)
    if mesh.shards == 1:
        text += f"; adapters are {'sharded over all processes' if mesh.splits_adapters_only else 'replicated too'}"
    return text


def sharding_facts(sharding: Sharding) -> dict[str, Any]:
    """For the event log."""
    return {
        "replicas": sharding.mesh.replicas,
        "shards": sharding.mesh.shards,
        "layer_class": sharding.layer_class,
        "units": sharding.units,
        "local_bytes": sharding.local_bytes,
        "total_bytes": sharding.total_bytes,
    }


def kernels_line(run: ResolvedRun, fused: Fused) -> str:
    """Which fused code runs, and where its eager twin does, why."""
    train = run.config.train
    fast = [_some_of("LoRA on", *fused.lora, "PEFT's own")] * (fused.lora[1] > 0)
    fast += [_some_of("experts of", *fused.experts, "transformers' own")] * (fused.experts[0] > 0)
    fast += ["loss"] * bool(train.fused_loss) + ["compiled layers"] * bool(train.compile)
    names = {"fused_lora": "LoRA", "fused_experts": "experts", "fused_loss": "loss", "compile": "layers"}
    if not fused.experts[1]:
        del names["fused_experts"]
    twins = [
        f"{name} ({run.reason(f'train.{key}') or f'train.{key} is false'})"
        for key, name in names.items()
        if not getattr(train, key)
    ]
    parts = [f"fused: {', '.join(fast)}"] * bool(fast) + [f"eager: {', '.join(twins)}"] * bool(twins)
    return "; ".join([*parts, f"attention: {run.config.model.attn_implementation}"])


def _some_of(what: str, here: int, of: int, else_by: str) -> str:
    return f"{what} {of} layers" if here == of else f"{what} {here} of {of} layers (else {else_by})"


def checkpointing_line(train: TrainSection, device: str) -> str:
    """What of a layer is kept for the backward pass, and where."""
    checkpointing = train.gradient_checkpointing
    if checkpointing == "selective":
        return "activation checkpointing: selective (products and attention are kept, the rest is recomputed)"
    if checkpointing:
        moved = train.offload_activations and device == "cuda"
        place = " in host memory" if moved else ""
        line = f"activation checkpointing: full (each layer's input is kept{place}, the layer is recomputed)"
        if train.offload_activations and not moved:
            line += "; train.offload_activations has no effect on a CPU"
        return line
    return "activation checkpointing: none"


def weights_lines(loaded: LoadStats, meta_model: MetaModel) -> list[str]:
    """What was read by this rank, how fast, and what was left where it is."""
    if loaded.strategy == "random":
        return [f"RANDOM, {size(loaded.local_bytes)} drawn here in {loaded.seconds:.1f} s"]
    speed = f"{size((loaded.bytes_read + loaded.bytes_received) / max(loaded.seconds, 1e-9))}/s"
    received = f" and {size(loaded.bytes_received)} received" if loaded.readers > 1 else ""
    lines = [
        f"{size(loaded.bytes_read)} read{received} in {loaded.seconds:.1f} s ({speed}), "
        f"{size(loaded.local_bytes)} held here; host memory peaked at {size(loaded.peak_host_bytes)}"
    ]
    lines[0] += _who_read(loaded)
    if loaded.strategy == "rank0-broadcast":
        lines[0] += "; rank 0 read for all ranks"
    if meta_model.wrapper is not None:
        other = meta_model.mapping.left_out
        lines.append(
            f"the text model out of {meta_model.wrapper.class_name}: {len(other)} other tensors "
            f"({size(sum(tensor.nbytes for tensor in other))}) not read"
        )
    if meta_model.mapping.unused_scales:
        lines.append(
            f"{count(meta_model.mapping.unused_scales, 'activation scale')} not used: activations stay in full"
        )
    if loaded.quantisation_error is not None:
        lines.append(
            f"quantised to float8 on load, one scale per row: relative error {loaded.quantisation_error:.2%} (norm of "
            f"the difference over norm of the weights), worst {loaded.worst_quantised}"
        )
    return lines


def _who_read(loaded: LoadStats) -> str:
    """With replicas: how many divided the reading, and what that was decided by."""
    measured = [
        f"{name} {size(rate)}/s"
        for name, rate in (("disk", loaded.disk_rate), ("network", loaded.link_rate))
        if rate is not None
    ]
    if loaded.readers == 1 and not measured:
        return ""
    who = f"{loaded.readers} replicas divided the reading" if loaded.readers > 1 else "every rank read all it holds"
    return f"; {who}" + (f" (measured: {', '.join(measured)})" if measured else "")


def coverage_line(coverage: Coverage) -> str:
    """How much trains, and how much of the model it acts on: two shares that are easily taken for each other."""
    covered = (sum(row.covers for row in coverage.rows) - coverage.in_full) / coverage.base
    line = (
        f"{coverage.trainable:,} parameters, {percent(coverage.share)} of all; adapters on {percent(covered)} of the "
        f"weights"
    )
    if coverage.visited is not None:
        active = (sum(row.covers_active for row in coverage.rows) - coverage.in_full) / coverage.active
        visited, experts = coverage.visited
        line += f", {percent(active)} of those active per token ({visited} of {experts} routed experts)"
    return f"{line}; {percent(coverage.in_full / coverage.base)} train in full" if coverage.in_full else line


def adapter_table(coverage: Coverage) -> Table:
    """Each target: what got adapters, how much trains there, and how much of the model the adapters are on."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("target", overflow="fold")
    table.add_column("adapters on")
    table.add_column("trainable parameters", justify="right")
    table.add_column("weights covered", justify="right")
    if coverage.visited is not None:
        table.add_column("active covered", justify="right")
    for row in coverage.rows:
        shares = [percent(row.covers / coverage.base)]
        shares += [percent(row.covers_active / coverage.active)] if coverage.visited is not None else []
        table.add_row(Text(row.pattern), _places(row.modules, row.tensors), f"{row.parameters:,}", *shares)
    return table


def _places(modules: int, tensors: int) -> str:
    parts = [count(modules, "module")] if modules or not tensors else []
    return ", ".join([*parts, *([count(tensors, "tensor")] if tensors else [])])
