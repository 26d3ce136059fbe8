"""What does it cost to get the weights in? Our sharded loading against three others, one checkpoint, one run.

    python benchmarks/load.py [--gigabytes 4] [--processes 2] [--repeats 3] [--json out.json]

All four end with the same thing: a bf16 Llama sharded by FSDP2 over the processes, on the CPU, every weight in place
(checked: each rank's shard has the same checksum in all four). They take turns, and the files' pages are dropped from
the page cache before each.

- ours: meta device, adapters, `fully_shard`, then each rank reads its slices (what `shardtune train` does).
- accelerate: `cpu_ram_efficient_loading`. `from_pretrained` on every rank with its variables set (rank 0 reads, the
  others hold zeros), then accelerate's own `fsdp2_load_full_state_dict`, which broadcasts every parameter whole.
  (accelerate itself never takes this path on a CPU; its steps are called here in its order.)
- transformers: `from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))`.
- plain: `from_pretrained` on every rank, then `fully_shard`.

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

WORKER = """
import json, os, sys, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
way, folder, out = sys.argv[1:]
if way == "accelerate":
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ModelSection, ParallelSection
from shardtune.model.meta_model import build_meta_model
from shardtune.model.weight_loading import unwrapped_name
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
    if way == "ours":
        section = ModelSection(model_name_or_path=folder, torch_dtype="bfloat16")
        checkpoint = find_checkpoint(section, processes)
        meta_model = build_meta_model(section, checkpoint.folder, checkpoint.stored)
        model, *_ = add_lora(meta_model.model, LoraSection(), meta_model.family)
        shard_model(model, ParallelSection(device="cpu"), processes.mesh, None)
        strategy = checkpoint.strategy
        load_sharded_weights(model, meta_model, strategy, processes, 0, lambda done, total: None, on_host=False)
        return model
    if way == "transformers":
        from transformers.distributed import DistributedConfig
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=processes.world_size))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if way == "plain":
        shard(model, processes.mesh)
        return model
    whole = model.state_dict()
    model = model.to("meta")
    shard(model, processes.mesh)
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=processes.is_main), model, whole)
    return model

with join(ParallelSection(device="cpu")) as processes:
    dist.barrier()
    imported = high_water()
    began = time.perf_counter()
    model = load(processes)
    held = {unwrapped_name(n): p for n, p in model.named_parameters() if isinstance(p, DTensor) and "lora_" not in n}
    sums = {name: checksum(parameter) for name, parameter in held.items()}
    dist.barrier()
    seconds, peak = time.perf_counter() - began, high_water()
    seen = {"seconds": seconds, "peak": peak, "imported": imported, "checksums": sums}
    open(f"{out}/rank{processes.rank}.json", "w").write(json.dumps(seen))
"""


def forget(folder: Path) -> None:
    """Drop the files' pages from the page cache."""
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(way: str, folder: Path, processes: int) -> list[dict]:
    """What each rank saw."""
    forget(folder)
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


def main() -> None:
    from toys import big_llama

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: dict[str, dict] = {way: {"seconds": [], "peak": []} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        size = big_llama(Path(folder), asked.gigabytes)
        sums: dict | None = None
        for _ in range(asked.repeats):
            for way in WAYS:
                ranks = measure(way, Path(folder), asked.processes)
                found = {rank: seen["checksums"] for rank, seen in enumerate(ranks)}
                sums = sums or found
                results[way]["same_weights"] = found == sums
                results[way]["seconds"].append(max(seen["seconds"] for seen in ranks))
                results[way]["peak"].append(max(seen["peak"] for seen in ranks))
                results[way]["imported"] = max(seen["imported"] for seen in ranks)
    print(f"{size / 1e9:.2f} GB in bf16, {asked.processes} processes, medians of {asked.repeats}")
    print(f"{'way':<13} {'seconds':>8} {'× accel.':>9} {'worst peak':>11} {'× accel.':>9}  same weights")
    middle = {way: {key: statistics.median(results[way][key]) for key in ("seconds", "peak")} for way in WAYS}
    for way in WAYS:
        seconds, peak = middle[way]["seconds"], middle[way]["peak"]
        ratios = seconds / middle["accelerate"]["seconds"], peak / middle["accelerate"]["peak"]
        same = results[way]["same_weights"]
        print(f"{way:<13} {seconds:>8.2f} {ratios[0]:>9.2f} {peak / 1e9:>8.2f} GB {ratios[1]:>9.2f}  {same}")
    print(f"before loading, imports done: {results['ours']['imported'] / 1e9:.2f} GB")
    if asked.json:
        asked.json.write_text(json.dumps({"bytes": size, "processes": asked.processes, "ways": results}, indent=2))


if __name__ == "__main__":
    main()
