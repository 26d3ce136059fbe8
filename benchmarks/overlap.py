"""Do gathers overlap with computing? Two processes shard a toy; each setting of prefetch, its step drawn as it ran.

    python benchmarks/overlap.py [--device cuda] [--blocking] [--repeats 5] [--trace out.json] [--json out.json]

A dense Llama with LoRA, sharded by `shard_model`, with `parallel.forward_prefetch` and `parallel.backward_prefetch` at
0, 1 and 2, and `parallel.reshard_after_forward` true and false. The settings take turns within one process group.

What is counted, for a step of forward and backward pass without optimizer (medians over the repeats):
- step: time of the slower rank; × 0 ahead: over the step with nothing prefetched in the same round.
- waited: share of the step in which the computation stood still for a gather, mean of the ranks.
- hidden: share of the time in which a layer was being gathered that some layer was computing, mean of the ranks.
- gathers: all-gathers of a step, the root unit's in it.

On a CPU, FSDP2's gathers block the thread that computes, however early they are issued: what overlaps on a GPU, where
they run in a stream of their own, cannot overlap there. So they are made asynchronous here (gloo's thread carries them
out, the layer waits when it needs its weights), which the product does not do; `--blocking` leaves them as they are.
`--device cuda` puts both processes on GPU 0. NCCL refuses two ranks on one GPU, so gloo carries the weights, through
the host and blocking it: this shows order and correctness, not speed. Over a loopback, copying takes the cores that
compute; no ratio here says what a network or NVLink would gain.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
RANKS = 2
SETTINGS = list(product((True, False), (0, 1, 2)))  # reshard_after_forward, layers ahead
LIMIT = 900  # seconds until a run that hangs is ended
COLUMNS = 100  # of a timeline
Span = tuple[float, float]
Times = list[tuple[str, int, str, float, float]]  # kind, unit, pass, began, ended


def worker(options: argparse.Namespace) -> None:
    """One rank: every setting's model, then steps in turns; what was seen goes into a file."""
    import torch
    import torch.distributed as dist
    from sharded_events import Recorder
    from torch.distributed.device_mesh import init_device_mesh

    from shardtune.parallel.interface import choose_interface
    from shardtune.parallel.mesh import Mesh
    from shardtune.parallel.shard import layers_of

    rank, on_cuda = int(os.environ["RANK"]), options.device == "cuda"
    choose_interface(os.environ)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(minutes=2))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    everyone = init_device_mesh(options.device, (RANKS,), mesh_dim_names=("shard",))
    mesh = Mesh(1, RANKS, (0,) * RANKS, everyone, everyone)
    models = [sharded(options, mesh, *setting) for setting in SETTINGS]
    recorders = [Recorder(model, layers_of(model), on_cuda=on_cuda) for model in models]
    ids = torch.randint(3, 70, (options.rows, 128), generator=torch.Generator().manual_seed(rank)).to(options.device)
    seen: list[dict[str, Any]] = [{"steps": [], "losses": []} for _ in SETTINGS]
    for number in range(options.repeats + 1):
        for model, recorder, mine in zip(models, recorders, seen, strict=True):
            dist.barrier()
            model.zero_grad()
            recorder.clear()
            began = recorder.mark()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            ended = recorder.mark()
            times = recorder.times(began)
            mine["losses"].append(loss.item())
            if number:  # the first round is warm-up
                mine["steps"].append({"seconds": recorder.seconds(began, ended), "times": times})
    (options.worker / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def sharded(options: argparse.Namespace, mesh: Any, reshard: bool, ahead: int) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from toys import toy_text_config
    from transformers import AutoModelForCausalLM

    from shardtune.config.schema import ParallelSection
    from shardtune.parallel.shard import shard_model

    torch.manual_seed(0)
    config = toy_text_config(
        "llama", num_hidden_layers=options.layers, hidden_size=options.hidden, intermediate_size=3 * options.hidden
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora).to(options.device).train()
    section = ParallelSection(
        device=options.device, forward_prefetch=ahead, backward_prefetch=ahead, reshard_after_forward=reshard
    )
    shard_model(model, section, mesh, None)
    if options.device == "cpu" and not options.blocking:
        model._set_unshard_async_op(True)
    return model


def run_ranks(arguments: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank saw. Whatever happens, no process outlives this."""
    from torch.distributed import TCPStore

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the ranks are ended too
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # on a port that is free
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "HF_HUB_OFFLINE": "1",
                   "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}  # fmt: skip
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [sys.executable, str(Path(__file__)), "--worker", str(folder), *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    ranks: list[subprocess.Popen] = []
    codes: list[int | None] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                own = {**environment, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
        until = time.monotonic() + LIMIT
        while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < until:
            if any(codes):  # the other would wait for it
                break
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for code, log in zip(codes, logs, strict=True):
        if code:
            sys.exit(f"{log.stem} failed with exit code {code}:\n{log.read_text()[-3000:]}")
    if None in codes:
        sys.exit(f"not done after {LIMIT} seconds:\n{logs[0].read_text()[-3000:]}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def total(spans: list[Span]) -> float:
    """Seconds covered by at least one span."""
    covered, end = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return covered


def spans(times: Times, kind: str) -> list[Span]:
    """Of layers; the root unit's gather is none of theirs, and its computing lies around all others."""
    return [(began, ended) for what, unit, _, began, ended in times if what == kind and unit >= 0]


def hidden(times: Times) -> float:
    gathers, computing = spans(times, "gather"), spans(times, "compute")
    both = total(gathers) + total(computing) - total([*gathers, *computing])
    return both / total(gathers)


def waited(step: dict[str, Any]) -> float:
    every = [(began, ended) for kind, _, _, began, ended in step["times"] if kind == "wait"]
    return total(every) / step["seconds"]


def slower(ranks: list[list[dict[str, Any]]], index: int) -> list[float]:
    """Seconds of each step on the rank that took longer."""
    steps = [rank[index]["steps"] for rank in ranks]
    return [max(step["seconds"] for step in both) for both in zip(*steps, strict=True)]


def summary(ranks: list[list[dict[str, Any]]], index: int) -> dict[str, float]:
    steps = [rank[index]["steps"] for rank in ranks]
    seconds, without = slower(ranks, index), slower(ranks, SETTINGS.index((SETTINGS[index][0], 0)))
    every = [step for of_rank in steps for step in of_rank]
    gathers = {sum(kind == "gather" for kind, *_ in step["times"]) for step in every}
    return {
        "seconds": statistics.median(seconds),
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(seconds, without, strict=True)),
        "waited": statistics.median(statistics.mean(map(waited, both)) for both in zip(*steps, strict=True)),
        "hidden": statistics.median(
            statistics.mean(hidden(step["times"]) for step in both) for both in zip(*steps, strict=True)
        ),
        "gathers": gathers.pop() if len(gathers) == 1 else float("nan"),
    }


def timeline(step: dict[str, Any], layers: int) -> list[str]:
    """One line for each layer: when it was gathered, computed forward and backward."""
    scale = COLUMNS / step["seconds"]
    lines = []
    for layer in range(layers):
        cells = [" "] * COLUMNS
        for sign, kind, of_pass in (("-", "gather", None), ("=", "compute", "forward"), ("#", "compute", "backward")):
            for what, unit, pass_, began, ended in step["times"]:
                if (what, unit) == (kind, layer) and of_pass in (None, pass_):
                    first = min(int(began * scale), COLUMNS - 1)
                    for cell in range(first, min(max(first + 1, int(ended * scale)), COLUMNS)):
                        cells[cell] = sign
        lines.append(f"  layer {layer:<3}|{''.join(cells)}|")
    return lines


def chrome_trace(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The last step of every setting and rank, each as a process of its own (chrome://tracing, ui.perfetto.dev)."""
    events: list[dict[str, Any]] = []
    rows = {"compute": 0, "wait": 1, "gather": 2, "reduce": 3}
    for (index, setting), rank in product(enumerate(SETTINGS), range(RANKS)):
        pid = index * RANKS + rank
        told = {"name": f"reshard {setting[0]}, {setting[1]} ahead, rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": told})
        for row, tid in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}})
        for kind, unit, pass_, began, ended in ranks[rank][index]["steps"][-1]["times"]:
            if kind not in rows or (kind, unit) == ("compute", -1):
                continue
            name = f"{kind} {'root' if unit < 0 else f'layer {unit}'} ({pass_})"
            times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
            events.append({"ph": "X", "name": name, "pid": pid, "tid": rows[kind], **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def tell(options: argparse.Namespace, ranks: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    found = {setting: summary(ranks, index) for index, setting in enumerate(SETTINGS)}
    blocks = options.device == "cuda" or options.blocking
    print(
        f"{RANKS} processes, {options.device}, gloo, gathers {'block' if blocks else 'do not block'} the host; "
        f"{options.layers} layers of width {options.hidden}; medians of {options.repeats}, {os.cpu_count()} cores"
    )
    print(f"{'reshard':<8} {'ahead':>5} {'step':>8} {'× 0 ahead':>10} {'waited':>7} {'hidden':>7} {'gathers':>8}")
    for (reshard, ahead), now in found.items():
        print(f"{'true' if reshard else 'false':<8} {ahead:>5} {now['seconds'] * 1e3:>5.0f} ms {now['ratio']:>10.2f} "
              f"{now['waited']:>7.1%} {now['hidden']:>7.1%} {now['gathers']:>8.0f}")  # fmt: skip
    for rank, mine in enumerate(ranks):
        losses = {tuple(setting["losses"]) for setting in mine}
        print(f"rank {rank}: loss {mine[0]['losses'][0]:.6f}, {'the same' if len(losses) == 1 else 'DIFFERENT'} in all")
    print("\nOne step on rank 0:  - gathered, from its issue on   = forward   # backward")
    for index, (reshard, ahead) in enumerate(SETTINGS):
        print(f"reshard {'true' if reshard else 'false'}, {ahead} ahead")
        print("\n".join(timeline(ranks[0][index]["steps"][-1], options.layers)))
    return {f"reshard {reshard}, {ahead} ahead": now for (reshard, ahead), now in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--blocking", action="store_true", help="leave gathers on a CPU as FSDP2 makes them")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2, help="of 128 tokens, a rank and step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="the last step of each setting, for chrome://tracing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch sees no CUDA device here.")
    arguments = [f"--{name}={getattr(options, name)}" for name in ("device", "layers", "hidden", "rows", "repeats")]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks([*arguments, *(["--blocking"] if options.blocking else [])], Path(folder))
    found = tell(options, ranks)
    if options.trace:
        options.trace.write_text(json.dumps(chrome_trace(ranks)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return None


if __name__ == "__main__":
    main()
