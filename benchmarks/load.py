"""What does it cost to get the weights in? Our sharded loading against three others, one checkpoint, one run.

    python benchmarks/load.py [--gigabytes 4] [--processes 2] [--repeats 3] [--only replicated] [--json out.json]

All four end with the same thing: a bf16 Llama sharded by FSDP2 over the processes, on the CPU, every weight in place
(checked: each rank's shard has the same checksum in all four). They take turns, and the files' pages are dropped from
the page cache before each.

- ours: meta device, adapters, `fully_shard`, then each rank reads its slices (what `shardtune train` does).
- accelerate: `cpu_ram_efficient_loading`. `from_pretrained` on every rank with its variables set (rank 0 reads, the
  others hold zeros), then accelerate's own `fsdp2_load_full_state_dict`, which broadcasts every parameter whole.
  (accelerate itself never takes this path on a CPU; its steps are called here in its order.)
- transformers: `from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))`.
- plain: `from_pretrained` on every rank, then `fully_shard`.

A second table compares two ways of loading replicas, where every process holds the whole model: each reads all of it
(`model.load: read-all`), or they divide the reading (`read-once`). The page cache is shared by the processes of one
machine, so that `read-all` reads the disk once here, too: nodes with disks of their own would not.

What is counted: seconds from the start of loading (imports done, process group up) until the last rank has added up
every weight it holds once (some ways only map the file, and read when a weight is used); the most memory of the worst
rank by then (VmHWM, which counts mapped pages of files too), torch and transformers themselves in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
WAYS = ("ours", "accelerate", "transformers", "plain")
REPLICATED = ("read-all", "read-once")

WORKER = """
import json, os, sys, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
way, folder, out = sys.argv[1:]
if way == "accelerate":
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ModelSection, ParallelSection
from shardtune.model.meta_model import build_meta_model
from shardtune.model.weight_loading import unwrapped_name
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import join
from shardtune.parallel.shard import shard_model
from shardtune.train.proof import checksum
from shardtune.train.weights import load_sharded_weights, find_checkpoint

def high_water():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

def load(processes):
    replicated = way.startswith("read-")
    mesh = build_mesh(processes, 1 if replicated else None, shard_adapters=replicated)
    if replicated or way == "ours":
        load = way if replicated else "auto"
        section = ModelSection(model_name_or_path=folder, torch_dtype="bfloat16", load=load)
        checkpoint = find_checkpoint(section, processes)
        meta_model = build_meta_model(section, checkpoint.folder, checkpoint.stored)
        model, *_ = add_lora(meta_model.model, LoraSection(), meta_model.family)
        shard_model(model, ParallelSection(device="cpu"), mesh, None)
        strategy = checkpoint.strategy
        load_sharded_weights(model, meta_model, strategy, processes, mesh, 0, lambda done, total: None, on_host=False)
        return model
    if way == "transformers":
        from transformers.distributed import DistributedConfig
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=processes.world_size))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if way == "plain":
        shard(model, mesh.base)
        return model
    whole = model.state_dict()
    model = model.to("meta")
    shard(model, mesh.base)
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=processes.is_main), model, whole)
    return model

with join(ParallelSection(device="cpu")) as processes:
    dist.barrier()
    imported = high_water()
    began = time.perf_counter()
    model = load(processes)
    held = {unwrapped_name(n): p for n, p in model.named_parameters() if "lora_" not in n}
    sums = {name: checksum(parameter) for name, parameter in held.items()}
    dist.barrier()
    seconds, peak = time.perf_counter() - began, high_water()
    seen = {"seconds": seconds, "peak": peak, "imported": imported, "checksums": sums}
    open(f"{out}/rank{processes.rank}.json", "w").write(json.dumps(seen))
"""


def forget(folder: Path) -> bool:
    """Drop the files' pages from the page cache; whether the kernel did (it may ignore the advice, or not say)."""
    dropped = True
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(handle, [bytearray(1)], file.stat().st_size // 2, os.RWF_NOWAIT)
            dropped = False
        except BlockingIOError:
            pass  # it would have to be read from the disk
        except OSError:
            dropped = False
        os.close(handle)
    return dropped


def measure(way: str, folder: Path, processes: int) -> list[dict]:
    """What each rank saw."""
    with tempfile.TemporaryDirectory() as out:
        script = Path(out) / "worker.py"
        script.write_text(WORKER)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
                   "--nproc-per-node", str(processes), str(script), way, str(folder), out]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{way} failed:\n{done.stderr[-3000:]}")
        return [json.loads((Path(out) / f"rank{rank}.json").read_text()) for rank in range(processes)]


def compare(ways: tuple[str, ...], reference: str, folder: Path, asked: argparse.Namespace) -> dict[str, dict]:
    """Let the ways take turns, and print each one's medians as multiples of the reference's."""
    results: dict[str, dict] = {way: {"seconds": [], "peak": []} for way in ways}
    sums: dict | None = None
    dropped = True
    for _ in range(asked.repeats):
        for way in ways:
            dropped = forget(folder) and dropped
            ranks = measure(way, folder, asked.processes)
            found = {rank: seen["checksums"] for rank, seen in enumerate(ranks)}
            sums = sums or found
            results[way]["same_weights"] = found == sums
            results[way]["seconds"].append(max(seen["seconds"] for seen in ranks))
            results[way]["peak"].append(max(seen["peak"] for seen in ranks))
            results[way]["imported"] = max(seen["imported"] for seen in ranks)
    print(f"\npage cache dropped before each: {'yes' if dropped else 'no, or not known'}")
    print(f"{'way':<13} {'seconds':>8} {'ratio':>9} {'worst peak':>11} {'ratio':>9}  same weights")
    middle = {way: {key: statistics.median(results[way][key]) for key in ("seconds", "peak")} for way in ways}
    for way in ways:
        seconds, peak = middle[way]["seconds"], middle[way]["peak"]
        ratios = seconds / middle[reference]["seconds"], peak / middle[reference]["peak"]
        same = results[way]["same_weights"]
        print(f"{way:<13} {seconds:>8.2f} {ratios[0]:>9.2f} {peak / 1e9:>8.2f} GB {ratios[1]:>9.2f}  {same}")
    print(f"before loading, imports done: {results[ways[0]]['imported'] / 1e9:.2f} GB")
    return results


def main() -> None:
    from toys import big_llama

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("sharded", "replicated"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = big_llama(Path(folder), asked.gigabytes)
        print(f"{size / 1e9:.2f} GB in bf16, {asked.processes} processes, medians of {asked.repeats}")
        if asked.only != "replicated":
            results |= compare(WAYS, "accelerate", Path(folder), asked)
        if asked.only != "sharded":
            results |= compare(REPLICATED, "read-all", Path(folder), asked)
    if asked.json:
        asked.json.write_text(json.dumps({"bytes": size, "processes": asked.processes, "ways": results}, indent=2))


if __name__ == "__main__":
    main()
