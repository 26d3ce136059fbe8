"""How is a plan shown on a terminal? The verdict first, then memory as a bar, and what the run will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from shardtune.plan.report import Plan, choices
from shardtune.plan.step_time import dominated_from
from shardtune.plan.steps import math_lines
from shardtune.terminal import clock, count, duration, percent, say, size, width_of, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.plan.compare import Alternative
    from shardtune.plan.run_time import RunTime
    from shardtune.plan.work import Work

_INDENT, _WIDEST = 10, 110
_COLOURS = {
    "weights": "blue", "gathered": "bright_cyan", "adapters": "green", "gradients": "yellow", "optimizer": "magenta",
    "activations": "red", "working": "bright_red", "loss": "bright_magenta", "communication": "bright_yellow",
    "context": "white",
}  # fmt: skip
_LETTERS = dict(zip(_COLOURS, "WGARMKULCX", strict=True))  # where there are no colours
# Choices that other lines show, or that are no news.
_OBVIOUS = ("parallel.nproc", "parallel.device", "train.eval_strategy", "train.fused_experts")
_BLOCK, _FREE = "█", "·"
_SPARKS = "▁▂▃▄▅▆▇█"


def show(console: Console, plan: Plan, nearest: Alternative | None = None) -> None:
    """Args:
    nearest: Settings that fit, where those of the plan do not.
    """
    console.print(Text(verdict(plan), style="bold green" if plan.fits else "bold red"), soft_wrap=True)
    if not plan.fits:
        _say_lines(console, "instead", _instead(nearest))
    console.print()
    for label, text in _first_lines(plan):
        say(console, label, text)
    _show_memory(console, plan)
    for label, text in _lines(plan):
        say(console, label, text)
    if len(plan.scaling) > 1:
        _show_scaling(console, plan)
    _say_lines(console, "auto", _choice_lines(plan))
    for notice in plan.run.notices:
        say(console, "notice", notice.text, "yellow")
    say(console, "rests on", rests_on(plan))


def verdict(plan: Plan) -> str:
    """`fits: 83.7 of 139.8 GiB per GPU, 40 % headroom`."""
    needs, has = _gib(plan.memory.total), _gib(plan.capacity)
    each = "GPU" if plan.facts.machine.device == "cuda" else "process"
    left = 1 - plan.memory.total / plan.capacity
    if plan.lacks_host_memory:
        has = size(plan.facts.machine.host_memory)
        return f"does not fit: needs {size(plan.host.per_node)} of host memory per node; there are {has}"
    if plan.fits:
        return f"fits: {needs} of {has} GiB per {each}, {100 * left:.0f} % headroom"
    return f"does not fit: needs {needs} GiB per {each}; {_gib(plan.usable)} of {has} GiB may be used"


def _instead(nearest: Alternative | None) -> list[str]:
    if nearest is None:
        return ["nothing fits here: use more or larger machines, a smaller model, or a shorter data.max_length"]
    needs = f"{_gib(nearest.memory.total)} GiB, {nearest.time.tokens_per_second:,.0f} tokens/s"
    return [f"the fastest that fits ({needs}):", *_options(nearest)]


def _say_lines(console: Console, label: str, texts: Sequence[str]) -> None:
    """Lines under one label."""
    for number, text in enumerate(texts):
        if number:
            console.print(Text(wrapped(" " * _INDENT + text, width_of(console), 2)), soft_wrap=True)
        else:
            say(console, label, text)


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _choice_lines(plan: Plan) -> list[str]:
    """A line for each reason; settings that one reason decides alike share it."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for path, value, why in choices(plan.run):
        if path not in _OBVIOUS:
            grouped.setdefault((_value(value), why), []).append(path)
    return [f"{', '.join(paths)}: {value} ({why})" for (value, why), paths in grouped.items()]


def _first_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    machine, facts = plan.facts.machine, plan.facts
    nodes = count(len(machine.nodes), "node")
    what = plan.cluster.gpu.name if machine.device == "cuda" else "CPU process"
    yield "on", f"{machine.nodes[0]} × {what} ({_gib(machine.memory)} GiB each), {nodes}"
    yield (
        "model",
        f"{plan.config.model.model_name_or_path} ({facts.model_type}, {facts.parameters:,} parameters, "
        f"{facts.trained:,} trained)",
    )


def _show_memory(console: Console, plan: Plan) -> None:
    """A bar of the whole GPU, and a line for each part of it."""
    width = min(console.width, _WIDEST) - _INDENT - 2
    coloured = console.color_system is not None and (console.encoding or "").lower().startswith("utf")
    each = "GPU" if plan.facts.machine.device == "cuda" else "process"
    say(console, "memory", f"of each {each} at the peak of a step ({plan.memory.moment})")
    console.print(Text(" " * _INDENT).append_text(bar(plan, width, coloured=coloured)), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=_INDENT - 2)
    table.add_column()
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for part, text in _explained(plan).items():
        number = getattr(plan.memory, part)
        if number:
            mark = Text(_BLOCK if coloured else _LETTERS[part], style=_COLOURS[part] if coloured else "")
            table.add_row("", mark, part, size(number), text)
    table.add_row("", "", Text("total", style="bold"), Text(size(plan.memory.total), style="bold"), _free_text(plan))
    console.print(table)


def _free_text(plan: Plan) -> str:
    return f"of {size(plan.capacity)}; up to {size(plan.usable)} may be filled"


def bar(plan: Plan, width: int, *, coloured: bool) -> Text:
    """The GPU's memory as a line of `width` columns; what does not fit goes beyond its end."""
    whole = max(plan.capacity, plan.memory.total)
    text, at, filled = Text(), 0, 0
    for part, number in plan.memory.parts().items():
        filled += number
        until = round(width * filled / whole)
        sign = _BLOCK if coloured else _LETTERS[part]
        text.append(sign * (until - at), style=_COLOURS[part] if coloured else "")
        at = until
    text.append((_FREE if coloured else ".") * (width - at), style="dim")
    if plan.memory.total > plan.capacity:
        end = min(width - 1, round(width * plan.capacity / whole))
        text = text[:end] + Text("|", style="bold") + text[end + 1 :]
    return text


def _explained(plan: Plan) -> dict[str, str]:
    """What each part is, in this run."""
    work, train = plan.work, plan.config.train
    base = "in FP8" if work.fp8 else "in bf16" if work.value_bytes == 2 else "in float32"
    shard = f"1/{work.shards} of the base" if work.shards > 1 else "the whole base"
    kept = {
        "none": "all that backward needs",
        "selective": "results of products and attention",
        "full": "each layer's input",
    }[work.checkpointing]
    where = ", most of it in host memory" if work.offload_activations else ""
    tokens = f"{work.tokens:,} tokens"
    gathered = f"layers in use, {work.prefetch} ahead" if work.reshard else "the base, kept between passes"
    if work.shards == 1:
        gathered = "layers copied from the host" if work.offload_params else "adapters as they are computed with"
    return {
        "weights": f"{shard}, {base}",
        "gathered": gathered,
        "adapters": "values in float32",
        "gradients": "of the adapters",
        "optimizer": train.optim,
        "activations": f"{kept}, {tokens}{where}",
        "working": "the layer being computed",
        "loss": "head and loss" + (", in chunks" if work.fused_loss else ""),
        "communication": "buffers of collectives",
        "context": "CUDA, libraries, allocator" if plan.facts.machine.device == "cuda" else "Python and its libraries",
    }


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    host, time = plan.host, plan.time
    parts = [f"{size(host.per_rank)} per process, {size(host.per_node)} per node or pod"]
    parts += [f"{size(host.offloaded)} of it offloaded"] if host.offloaded else []
    parts += [f"{size(host.pinned)} pinned"] if host.pinned else []
    yield "host", ", ".join(parts) + f"; /dev/shm {size(host.shm)}"
    yield "disk", f"{size(host.disk)} for checkpoints ({size(host.checkpoint)} each)"
    if plan.data is not None and plan.math is not None:
        packed = plan.config.train.packing is True
        full = percent(plan.data.fill(plan.work.length, packed=packed))
        rows = count(plan.data.sequences, "packed sequence") if packed else "rows"
        yield (
            "data",
            f"{plan.data.rows:,} rows, {plan.data.tokens:,} tokens; {rows} of up to {plan.work.length:,} are {full} "
            f"full ({plan.data.how})",
        )
        batch, steps = math_lines(plan.math, "sequences" if packed else "rows")
        yield "batch", batch
        yield "steps", steps
    else:
        yield "data", "not known: it is read by `datasets` (shardtune data prepare CONFIG, or --exact)"
    yield "step", f"{duration(time.seconds)}, {time.tokens_per_second:,.0f} tokens/s: {_step_parts(plan)}"
    if plan.total is not None:
        yield "time", _total(plan.total)
    if plan.facts.machine.world_size > 1:
        sent = f"{size(plan.traffic.shard + plan.traffic.replicate)} sent by each GPU per step"
        far = f", {size(plan.traffic.between_nodes)} from each node" if plan.traffic.between_nodes else ""
        hidden = time.communication - time.exposed
        yield (
            "traffic",
            f"{sent}{far}: {duration(time.communication)}, {duration(max(0.0, hidden))} of it while computing",
        )


def _total(total: RunTime) -> str:
    rest = {"to start": total.starting, "evaluating": total.evaluating, "saving": total.saving}
    coarse = ", ".join(f"{clock(seconds)} {what}" for what, seconds in rest.items() if seconds >= 1)
    return f"about {clock(total.seconds)}: {clock(total.training)} in steps, {coarse}"


def _step_parts(plan: Plan) -> str:
    time = plan.time
    parts = {
        "matrix products": time.products,
        "attention": time.attention,
        "elementwise": time.elementwise,
        "adapters": time.adapters,
        "dequantising": time.dequantise,
        "head and loss": time.head,
        "launching kernels": time.launches,
        "optimizer": time.optimizer,
        "waiting for communication": time.exposed,
        "waiting for offloading": time.offload,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {100 * share:.0f}\u00a0%" for name, part in ordered if (share := part / time.seconds) >= 0.005
    )


def show_alternatives(console: Console, plan: Plan, found: Sequence[Alternative]) -> None:
    """A line for each, the fastest that fits first; what differs from the plan is bold."""
    current = next(one for one in found if not one.changes)
    say(console, "compare", "with the same effective batch; spare: GiB that may still be filled")
    padding = 1 if console.width < 100 else 2
    table = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, header_style="bold")
    for name in ("tokens/s", "speed", "GiB", "spare", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("recompute", "base", "offload", "sharding"):
        table.add_column(name, no_wrap=True)
    own = _setting_cells(current.work)
    for one in found:
        cells = [
            Text(cell, style="bold" if cell != mine else "")
            for cell, mine in zip(_setting_cells(one.work), own, strict=True)
        ]
        table.add_row(
            f"{one.time.tokens_per_second:,.0f}",
            "plan" if one is current else f"{one.time.tokens_per_second / current.time.tokens_per_second:.2f}x",
            _gib(one.memory.total),
            f"{(one.usable - one.memory.total) / 2**30:+.1f}",
            *cells,
            style="green" if one is current else "" if one.fits else "dim",
        )
    console.print(table)
    fastest = found[0]
    if fastest.changes and fastest.fits:
        _say_lines(console, "fastest", _options(fastest))


def _setting_cells(work: Work) -> tuple[str, str, str, str, str]:
    base = "fp8 x fp8" if work.fp8_compute else "fp8" if work.fp8 else "bf16" if work.value_bytes == 2 else "float32"
    offload = [name for name, on in (("inputs", work.offload_activations), ("params", work.offload_params)) if on]
    sharding = "none" if work.shards == 1 else f"{work.shards} {'reshard' if work.reshard else 'keep'}"
    batch = f"{work.batch} x {work.accumulation}"
    return batch, work.checkpointing, base, "both" if len(offload) == 2 else "".join(offload) or "-", sharding


def _options(one: Alternative) -> list[str]:
    """As the command line takes them."""
    return [f"-o {path}={_value('null' if value is None else value)}" for path, value in one.changes.items()]


def _show_scaling(console: Console, plan: Plan) -> None:
    say(console, "scaling", _scaling_sentence(plan))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", width=_INDENT - 2)
    each = "GPUs" if plan.facts.machine.device == "cuda" else "processes"
    for name in ("nodes", each, "tokens/s", "efficiency", "waiting for links"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    sparks = console.encoding.lower().startswith("utf")
    for point in plan.scaling:
        level = _SPARKS[min(7, int(8 * point.efficiency))] * 3 if sparks else ""
        here = point.nodes == len(plan.facts.machine.nodes)
        table.add_row(
            "",
            str(point.nodes),
            f"{point.nodes * plan.facts.machine.nodes[0]:,}",
            f"{point.step.tokens_per_second:,.0f}",
            f"{100 * point.efficiency:.0f} %",
            f"{100 * point.communication:.0f} %",
            level + ("  <" if here else ""),
            style="bold" if here else "",
        )
    console.print(table)


def _scaling_sentence(plan: Plan) -> str:
    over, link = dominated_from(plan.scaling), plan.cluster.between.name
    if over is None:
        return f"the links ({link}) never take longer than computing, up to {plan.scaling[-1].nodes} nodes"
    return f"the links ({link}) take longer than computing from {count(over, 'node')} on"


def rests_on(plan: Plan) -> str:
    """What the numbers are worth."""
    known = {
        "table": f"activations from the table for {plan.facts.model_type}",
        "traced": "activations traced now",
        "estimated": f"activations estimated: no {plan.facts.model_type} with such settings in the table (try --exact)",
    }[plan.memory.known_by]
    gpu = plan.cluster.gpu
    rates = f"rates measured on {gpu.name}" if gpu.measured else f"rates of {gpu.name} from data sheets, not measured"
    if plan.facts.machine.device == "cpu":
        return "memory and time on a CPU are coarse: an order of magnitude"
    return f"{known}; {rates}"
