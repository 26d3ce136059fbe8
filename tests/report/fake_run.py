"""A run folder as a training would leave it, written from a seed in a moment: for tests and for looking at the pages."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
CONFIG = """model:
  model_name_or_path: toys/dense              # file: run.yaml:2:3
  torch_dtype: bfloat16                       # default
data:
  dataset_name_or_path: data/instructions     # file: run.yaml:5:3
  train_split: train                          # default
  max_length: 1024                            # override: -o data.max_length
lora:
  r: {r}                                       # file: run.yaml:8:3
train:
  learning_rate: {rate}                      # file: run.yaml:11:3
  output_dir: runs                            # default
  model_init_kwargs:
    note: "a  # in a value"                   # file: run.yaml:13:5
"""
SOFTWARE = {
    "packages": {"shardtune": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "trl": "1.16.0", "peft": "0.21.2"},
    "python": "3.11.9", "platform": "Linux-6.8-x86_64", "host": "node-a", "cpus": 96, "gpus": ["NVIDIA H200"] * 4,
    "cuda": "13.0",
}  # fmt: skip


class FakeRun:
    """Writes the files of a run; each method appends what a training would at that point."""

    def __init__(self, folder: Path, *, ranks: int = 2, start: float = 1_790_000_000.0, seed: int = 1) -> None:
        self.folder, self.ranks, self.now, self.random = folder, ranks, start, random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokens = 0

    def write(self, event: str, rank: int = 0, **fields: Any) -> None:
        record = {"v": 2, "time": round(self.now, 3), "rank": rank, "event": event, **fields}
        self.raw(json.dumps(record) + "\n", rank)

    def raw(self, text: str, rank: int = 0) -> None:
        with (self.folder / f"events-rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(text)

    def profiled(self, model: str) -> None:
        """Instead of `begin`: a script's own Trainer, with the profiler as a callback."""
        self.everywhere("run_start", run=self.folder.name, world_size=self.ranks, environment=SOFTWARE, model=model)

    def script(self, *words: str, **ended: float) -> None:
        """Instead of `begin`: the record of `shardtune run`, and of its end."""
        record = {
            "kind": "script",
            "command": list(words),
            "started": self.now,
            "finished": not ended.get("exit_code", 1),
        }
        (self.folder / "run.json").write_text(json.dumps({**record, **ended}))

    def script_start(self, *words: str) -> None:
        self.script(*words)
        command = f"shardtune run --nproc {self.ranks} -- {' '.join(words)}"
        self.everywhere(
            "run_start", run=self.folder.name, world_size=self.ranks, environment=SOFTWARE, script=words[0], command=command
        )  # fmt: skip

    def script_step(self, step: int, *, unit: str = "images", **metrics: float) -> None:
        """One step of two seconds, of which half a second waits for data, with 8 samples on each rank."""
        self.everywhere("metrics", step=step, values=metrics)
        self.everywhere(
            "profile", step=step, seconds={"step": 2.0, "data": 0.5}, samples=8, sample_unit=unit, samples_per_second=4.0,
            host={"rss": GIB, "cpu_percent": 99.0},
        )  # fmt: skip
        self.now += 2

    def log(self, rank: int, text: str) -> None:
        (self.folder / "logs").mkdir(exist_ok=True)
        (self.folder / "logs" / f"rank-{rank}.log").write_text(text, encoding="utf-8")

    def everywhere(self, event: str, **fields: Any) -> None:
        for rank in range(self.ranks):
            self.write(event, rank, **fields)

    def begin(self, steps: int = 100, *, r: int = 16, rate: str = "0.0002", model: str = "toys/dense") -> None:
        settings = {"model": {"model_name_or_path": model}}
        record = {"format": 1, "identity": "x", "settings": settings, "started": self.now, "finished": False}
        (self.folder / "run.json").write_text(json.dumps(record))
        (self.folder / "config.yaml").write_text(CONFIG.format(r=r, rate=rate), encoding="utf-8")
        (self.folder / "environment.json").write_text(json.dumps(SOFTWARE))
        command = "shardtune train run.yaml -o data.max_length=1024"
        self.everywhere("run_start", run=self.folder.name, world_size=self.ranks, environment=SOFTWARE, command=command)
        counts = {"read": 12_000, "rows": 11_870, "tokens": 4_210_000, "supervised": 1_870_000, "dropped_short": 130}
        validation = {"read": 600, "rows": 600, "tokens": 210_000, "supervised": 93_000}
        form = {"name": "messages", "why": "every row has a list of role and content"}
        self.everywhere("data", format=form, folder="cache/1", train=counts, validation=validation)
        for rank in range(self.ranks):
            gpus = [{"name": "NVIDIA H200", "memory_bytes": 141 * GIB, "driver": "580.82"}] * 4
            self.write("hardware", rank, host="node-a", cpus=96, ram_bytes=2014 * GIB, gpus=gpus, nccl="2.30")
        rows = [
            {
                "pattern": "attention",
                "modules": 96,
                "tensors": 0,
                "parameters": 9_437_184,
                "covers": 805_306_368,
                "covers_active": 805_306_368,
            },
            {
                "pattern": "experts.gate_up_proj",
                "modules": 0,
                "tensors": 24,
                "parameters": 18_874_368,
                "covers": 3_221_225_472,
                "covers_active": 402_653_184,
            },
        ]
        adapters = {
            "rows": rows,
            "trainable": 28_311_552,
            "total": 7_270_000_000,
            "base": 7_241_732_096,
            "active": 4_423_160_000,
            "visited": [4, 32],
        }
        math_ = {
            "per_device": 4,
            "processes": self.ranks,
            "accumulation": 2,
            "rows": 11_870,
            "tokens": 4_210_000,
            "epochs": 3.0,
            "steps_per_epoch": max(1, steps // 3),
            "steps": steps,
            "warmup_steps": 10,
        }
        parts = {"weights": 14 * GIB, "activations": 44 * GIB, "allocated": 60 * GIB, "total": 61 * GIB}
        expected = {"memory": parts, "known_by": "table", "coarse": False, "step_seconds": 0.8, "measured": True}
        sharding = {"layer_class": "Layer", "units": 24}
        self.everywhere("plan", math=math_, adapters=adapters, sharding=sharding, expected=expected)
        self.now += 20

    def step(
        self, step: int, total: int = 100, *, log_every: int = 1, loss: float | None = None, slow_rank: int = -1
    ) -> float:
        """The events of one step on every rank; returns the loss."""
        noise = self.random.gauss
        if loss is None:
            loss = 0.45 + 2.1 * math.exp(-4 * step / total) + noise(0, 0.035)
        seconds = max(0.3, noise(0.81, 0.02) + (0.6 if step % 97 == 0 else 0))
        self.tokens += 1024 * 4 * self.ranks
        for rank in range(self.ranks):
            own = seconds * (1.22 if rank == slow_rank else 1) + abs(noise(0, 0.004))
            self.write(
                "profile", rank, step=step,
                seconds={"step": round(own, 4), "data": 0.004, "forward": round(0.3 * own, 4), "backward": round(0.56 * own, 4), "optimizer": 0.03, "collective": round(0.04 * own, 4)},
                tokens={"supervised": 1800, "real": 4000, "padded": 96}, tokens_per_second=round(4000 / own, 1),
                tflops=round(331 / own, 1), hardware_tflops=round(430 / own, 1), mfu=round(0.335 / own, 4), hfu=round(0.43 / own, 4),
                memory={"allocated": 31 * GIB, "reserved": 66 * GIB, "peak": int((58 + rank + 2 * min(1, step / 20)) * GIB)},
                host={"rss": int((6.1 + 0.1 * rank) * GIB), "cpu_percent": 101.0},
                gpu={"utilization": 97, "sm_clock_mhz": 1980, "power_watts": round(noise(640, 9), 1), "temperature_c": 61 + rank + int(4 * min(1, step / 40)), "throttle": ["sw_power_cap"] if rank == 1 and step % 9 == 0 else []},
            )  # fmt: skip
        self.now += seconds
        if step % log_every == 0 or step == total:
            rate = 2e-4 * min(1.0, step / 10) * 0.5 * (1 + math.cos(math.pi * step / total))
            value: object = loss if math.isfinite(loss) else str(loss)
            self.everywhere(
                "step", step=step, epoch=3 * step / total, loss=value, grad_norm=round(abs(noise(0.8, 0.12)), 4),
                learning_rate=rate, tokens=self.tokens, tokens_per_second=round(4000 * self.ranks / seconds, 1),
            )  # fmt: skip
        return loss

    def evaluate(self, step: int, loss: float) -> None:
        self.everywhere("eval", step=step, loss=loss, tokens=93_000)
        self.now += 4

    def checkpoint(self, step: int, loss: float | None) -> None:
        from shardtune.checkpoint.store import CheckpointStore

        def fill(folder: Path) -> None:
            (folder / "adapter_model.safetensors").write_bytes(b"\0" * 4096)

        store = CheckpointStore(self.folder / "checkpoints", keep=None)
        store.write(step, fill, {"eval_loss": loss, "time": self.now, "world_size": self.ranks})
        self.write("checkpoint", step=step, path=str(store.path(step)), bytes=4096, seconds=0.2, background_seconds=1.1)

    def samples(self, when: str) -> None:
        asked = [("validation:12", "Wake me at seven tomorrow.", '{"intent": "alarm", "time": "07:00"}', "Sure! I will wake you up at seven tomorrow."),
                 ("validation:40", "Play something by Nina Simone.", '{"intent": "play_music", "artist": "Nina Simone"}', "Nina Simone was an American singer, and")]  # fmt: skip
        for row, prompt, expected, before in asked:
            answer = before if when == "before" else expected
            self.write("sample", when=when, row=row, prompt=prompt, answer=answer, expected=expected)

    def scores(self) -> None:
        for when, loss, exact in (("before", 3.49, 0.0), ("after", 0.06, 71.0)):
            self.write("score", when=when, name="test loss", value=loss, rows=48)
            self.write("score", when=when, name="exact match", value=exact, unit="%", rows=48)

    def end(self, step: int, status: str = "done") -> None:
        self.everywhere("run_end", status=status, step=step, seconds=100.0, loss=0.5)


def showcase(folder: Path, *, ranks: int = 4, steps: int = 400, seed: int = 1, **begin: Any) -> FakeRun:
    """A run in which everything happened: a spike and a rollback, a restart, throttling, a slow rank, and a good end."""
    run = FakeRun(folder, ranks=ranks, seed=seed)
    run.begin(steps, **begin)
    run.samples("before")
    run.write(
        "warning", about="data", text="130 rows were empty and dropped. Look at them with `shardtune data inspect`."
    )
    reached = 0
    for step in range(1, 261):
        spike = {148: 6.2, 149: 7.9}.get(step)
        run.step(step, steps, loss=spike, slow_rank=2)
        if step == 150:
            run.everywhere("guard", guard="loss_spike", step=150, action="rollback", value=7.9, limit=3.2, to_step=100, ranks=[1], rows=["train:812", "train:97"],
                           text="The loss rose to 7.9, far above the 0.9 of the steps before; the run goes back to step 100 and skips those rows.")  # fmt: skip
            for again in range(101, 151):
                run.step(again, steps, slow_rank=2)
        if step % 50 == 0:
            loss = 0.52 + 1.9 * math.exp(-4 * step / steps) + (0.12 if step > 200 else 0)
            run.evaluate(step, round(loss, 4))
            run.checkpoint(step, round(loss, 4))
        reached = step
    run.raw('{"v": 2, "time": 179', 3 if ranks > 3 else 0)
    run.raw("\n", 3 if ranks > 3 else 0)
    run.now += 240
    command = "shardtune train run.yaml -o data.max_length=1024"
    run.everywhere("run_start", run=folder.name, world_size=ranks, environment=SOFTWARE, command=command)
    run.everywhere("resume", step=250, path="checkpoints/step-000250", world_size=ranks, changes=[], damaged=[])
    assert reached > 250
    for step in range(251, steps + 1):
        run.step(step, steps, slow_rank=2)
        if step % 50 == 0:
            loss = 0.5 + 1.9 * math.exp(-4 * step / steps) + (0.02 if step > 350 else 0)
            run.evaluate(step, round(loss, 4))
            run.checkpoint(step, round(loss, 4))
        if step == 300:
            run.write("guard", 2, guard="straggler", step=300, action="warn", value=1.22, limit=1.15, ranks=[2],
                      text="Rank 2 takes 22 % longer for a step than the others.")  # fmt: skip
    run.samples("after")
    run.scores()
    run.end(steps)
    return run


def script_run(folder: Path, *, steps: int = 60, ranks: int = 2, words: tuple[str, ...] = ("train.py",)) -> FakeRun:
    """A script that logs its loss at every step and mAP after each 20, resumes once, and ends well."""
    run = FakeRun(folder, ranks=ranks)
    run.script_start(*words)

    def train(begin: int, end: int, worse: float) -> None:
        for step in range(begin, end + 1):
            run.script_step(step, loss=worse + 2 / step, **{"train/lr": 1e-3})
            if step % 20 == 0:
                run.everywhere("metrics", step=step, values={"val/mAP@50": round(step / 100 - worse / 100, 4)})
                run.checkpoint(step, None)

    train(1, 47, 9.0)
    run.now += 3600
    run.script_start(*words)
    run.everywhere("resume", step=20, path="checkpoints/step-000020", world_size=ranks, changes=[], damaged=[])
    train(21, steps, 0.0)
    run.end(steps)
    for rank in range(ranks):
        run.log(rank, f"rank {rank} is done\n")
    run.script(*words, exit_code=0, ended=run.now)
    return run


def long_run(folder: Path, *, steps: int = 100_000, ranks: int = 4, extreme: tuple[int, float] = (0, 0.0)) -> None:
    """Very many steps, written in one go; the loss and rank 1's peak memory have one extreme value at a given step."""
    run = FakeRun(folder, ranks=ranks)
    run.begin(steps)
    at, value = extreme
    for rank in range(ranks):
        lines = []
        for step in range(1, steps + 1):
            now = run.now + step
            peak = int((900.25 if step == at and rank == 1 else 60 + (step * 7 + rank) % 13 / 10) * GIB)
            lines.append(
                f'{{"v":2,"time":{now},"rank":{rank},"event":"profile","step":{step},"seconds":{{"step":0.81{step % 10},"data":0.004,'
                f'"forward":0.25,"backward":0.49,"optimizer":0.03,"collective":0.02}},"tokens":{{"supervised":900,"real":1024,"padded":64}},'
                f'"tokens_per_second":126{step % 10}.5,"tflops":310.{step % 10},"mfu":0.31{step % 7},"hfu":0.4,'
                f'"memory":{{"allocated":1,"reserved":70000000000,"peak":{peak}}},"host":{{"rss":6{step % 9}00000000,"cpu_percent":97.0}},'
                f'"gpu":{{"utilization":98,"sm_clock_mhz":1980,"power_watts":64{step % 10}.1,"temperature_c":66}}}}\n'
            )
            if step % 2 == 0:
                loss = value if step == at else round(0.5 + 2 * math.exp(-step / 30_000) + step * 31 % 17 / 100, 5)
                lines.append(
                    f'{{"v":2,"time":{now},"rank":{rank},"event":"step","step":{step},"epoch":1.0,"loss":{loss},"grad_norm":0.{step % 7 + 1},'
                    f'"learning_rate":0.0001,"tokens":{step * 4096},"tokens_per_second":5040.5}}\n'
                )
        run.raw("".join(lines), rank)
    run.now += steps
    run.end(steps)


def keep_writing(folder: Path, begin: int, until: int, pause: float) -> None:
    """Append steps until told to stop or done, as a training process does."""
    run = FakeRun(folder, ranks=2)
    run.now = time.time()
    for step in range(begin, until + 1):
        run.step(step, until)
        time.sleep(pause)
        run.now = time.time()


if __name__ == "__main__":
    keep_writing(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
