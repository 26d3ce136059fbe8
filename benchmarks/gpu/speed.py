"""How fast is it, and against what? Every row of the speed table, ours and its references, in one run on one machine.

    python benchmarks/gpu/speed.py --out DIR [--rows dense,moe8] [--budget 540] [--quick] [--unsloth-site DIR]
    python benchmarks/gpu/speed.py dense-4k moe8,train.compile=false     # single cases, with settings

Ours go through `shardtune train`, the references through the libraries alone; each is a process of its own.
DIR/speed.json is written after every measurement, so that what is cut short keeps what it has; `--resume` goes on from
it. Tokens per second are real tokens (no padding) over wall time, the median of windows of steps after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ours
from apart import Ended, MemoryInUse, nobody_tells, nvml_memory, run_apart, wait_for_memory
from cases import (
    CASES,
    DENSE_TARGETS,
    END,
    EXPERT_PARAMETERS,
    MOE_TARGETS,
    QUICK,
    TINY,
    Case,
    Pace,
    shape_of,
    write_model,
    write_rows,
)
from machine import about_machine, has_module
from rows import ROWS, cases_of
from stock import Settings
from table import text_table
from windows import read_windows

ROOT = Path(__file__).parent.parent.parent
_LEAST = 15.0  # seconds below which nothing is begun any more
Result = dict[str, Any]


@dataclass
class Harness:
    """Measures cases one after the other, and keeps what is known so far in `out`/speed.json.

    Args:
        limit: Seconds one measurement may take.
        deadline: On the monotonic clock; what is not begun by then is not measured.
    """

    out: Path
    about: Mapping[str, Any]
    pace: Pace = field(default_factory=Pace)
    tiny: bool = False
    limit: float = 300.0
    deadline: float = float("inf")
    unsloth_site: Path | None = None
    in_use: MemoryInUse = nobody_tells
    run: Callable[..., Ended] = run_apart
    measurements: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = self.in_use()

    def measure(self, label: str) -> Result:
        """One case by its name, perhaps with settings behind it; the result is in the file when this returns."""
        name, *overrides = label.split(",")
        case = CASES[name].tiny() if self.tiny else CASES[name]
        left = self.deadline - time.monotonic()
        obstacle = self._obstacle(case) or ("budget" if left < _LEAST else None)
        result: Result = {"by": case.by, "overrides": overrides}
        if obstacle is not None:
            result["why"] = obstacle
        else:
            notes = [] if wait_for_memory(self.in_use, self.free) else ["the device's memory was not free"]
            result |= self._measured(label, case, overrides, min(self.limit, left), notes)
        self.measurements[label] = {**result, "commit": self.about["commit"]}
        self.write()
        return self.measurements[label]

    def _obstacle(self, case: Case) -> str | None:
        """Why a case cannot be measured here."""
        if case.sets.get("liger") is True and not has_module("liger_kernel"):
            return "liger-kernel is not installed"
        if case.by != "unsloth":
            return None
        if self.unsloth_site is None:
            return "no --unsloth-site"
        return None if (self.unsloth_site / "unsloth").is_dir() else f"no unsloth in {self.unsloth_site}"

    def _measured(self, label: str, case: Case, overrides: list[str], limit: float, notes: list[str]) -> Result:
        log = self.out / f"{label.replace('/', '_')}.log"
        with tempfile.TemporaryDirectory(prefix="speed-") as place:
            folder = Path(place)
            read = self._lay_out_ours if case.by == "ours" else self._lay_out_reference
            command, settings, numbers_of = read(case, overrides, folder)
            ended = self.run(command, log, limit, self._environment(case))
            numbers, settled = numbers_of(), settings()
        result: Result = {"settings": settled, **numbers, "wall_seconds": round(ended.seconds, 1)}
        short_of_time = "budget" if limit < self.limit else f"took longer than {limit:.0f} s"
        if not numbers:
            result["why"] = short_of_time if ended.code is None else why_it_failed(log, ended.code)
        elif ended.code != 0:
            notes.append(f"cut short: {short_of_time if ended.code is None else why_it_failed(log, ended.code)}")
        return {**result, "notes": notes} if notes else result

    def _lay_out_ours(self, case: Case, overrides: list[str], folder: Path) -> Any:
        config = ours.config_of(case, folder, self.pace, tiny=self.tiny)
        run = ours.run_folder(folder)
        return (
            ours.command(config, overrides), lambda: ours.told_settings(run),
            lambda: ours.read_run(run, self.pace.warm),
        )  # fmt: skip

    def _lay_out_reference(self, case: Case, overrides: list[str], folder: Path) -> Any:
        # Nothing is compiled in the references: one window warms them up.
        pace = replace(self.pace, warm=self.pace.window)
        settings = reference_settings(case, folder, pace, tiny=self.tiny, overrides=overrides)
        file = folder / "settings.json"
        file.write_text(json.dumps(asdict(settings)))
        script = {"stock": "stock.py", "unsloth": "unsloth_step.py"}[case.by]
        told = {k: v for k, v in asdict(settings).items() if k not in ("model", "rows", "out", "end")}
        return (
            [sys.executable, str(Path(__file__).parent / script), str(file)], lambda: told,
            lambda: read_windows(Path(settings.out), pace.warm),
        )  # fmt: skip

    def _environment(self, case: Case) -> dict[str, str]:
        # Unsloth's folder has all it needs, in the versions it asks for.
        path = [str(self.unsloth_site)] if case.by == "unsloth" else [str(ROOT), os.environ.get("PYTHONPATH")]
        threads = {"OMP_NUM_THREADS": "1"} if self.tiny else {}  # toys lose more by sharing work than they gain
        return {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "UNSLOTH_DISABLE_STATISTICS": "1", **threads,
        }  # fmt: skip

    def told(self) -> dict[str, Any]:
        return {"about": dict(self.about), "measurements": self.measurements}

    def write(self) -> None:
        new = self.out / "speed.json.new"
        new.write_text(json.dumps(self.told(), indent=2))
        new.replace(self.out / "speed.json")  # at once: whoever ends this process finds the old or the new one


def reference_settings(case: Case, folder: Path, pace: Pace, *, tiny: bool, overrides: list[str]) -> Settings:
    """The case as `stock.Settings`, with its model and rows written into `folder`."""
    shape = shape_of(case.model, tiny=tiny)
    given = dict(case.sets)
    given["parameters"] = EXPERT_PARAMETERS if given.pop("experts", False) else []
    if given.get("liger") == "if there":
        given["liger"] = has_module("liger_kernel")
    given |= {key: json.loads(value) for key, value in (override.split("=") for override in overrides)}
    return Settings(
        model=str(write_model(folder / case.model, shape)),
        rows=str(write_rows(folder / "rows.jsonl", case, pace.steps, int(str(shape["vocab_size"])))),
        out=str(folder / "windows.jsonl"),
        end=END,
        length=case.length,
        batch=case.batch,
        accumulation=case.accumulation,
        steps=pace.steps,
        window=pace.window,
        targets=DENSE_TARGETS if case.model == "dense" else MOE_TARGETS,
        **given,
    )


def why_it_failed(log: Path, code: int) -> str:
    """The cause, in a few words, of a process that ended before it had a number."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if any(re.search(r"out of (GPU )?memory", line, re.IGNORECASE) for line in lines):
        return "out of memory"
    errors = [line for line in lines if "error" in line.lower()]
    return ((errors or lines or [f"exit code {code}"])[-1])[:300]


def taken_over(file: Path, about: Mapping[str, Any]) -> dict[str, Result]:
    """What need not be measured again: it was, on this machine with these libraries, and ours at this commit."""
    if not file.exists():
        return {}
    told = json.loads(file.read_text())
    same = all(told["about"].get(key) == about[key] for key in ("chip", "versions", "tiny"))
    found = told["measurements"] if same else {}
    return {
        label: one for label, one in found.items()
        if "tokens_per_second" in one and (one["by"] != "ours" or one["commit"] == about["commit"])
    }  # fmt: skip


def asked_for() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"instead of rows: {', '.join(CASES)}; perhaps with settings behind")
    parser.add_argument("--rows", help=f"some of: {', '.join(row.name for row in ROWS)} (all, if not given)")
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="folder for speed.json and logs")
    parser.add_argument("--limit", type=float, default=300, help="seconds one measurement may take")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds all of them may take")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--tiny", action="store_true", help="toys on a CPU: tests the harness, measures nothing")
    parser.add_argument("--resume", action="store_true", help="keep what speed.json has of this machine and commit")
    parser.add_argument("--unsloth-site", type=Path, help="a folder from which unsloth can be imported")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    asked = parser.parse_args()
    known = {row.name for row in ROWS}
    wrong = [name for name in (asked.rows or "").split(",") if name and name not in known]
    wrong += [label for label in asked.cases if label.split(",")[0] not in CASES]
    if wrong:
        parser.error(f"unknown: {', '.join(wrong)}")
    return asked


def main() -> None:
    asked = asked_for()
    # An exception, so that what is being measured is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    pace = TINY if asked.tiny else QUICK if asked.quick else Pace()
    deadline = time.monotonic() + asked.budget
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {**about_machine(asked.commit, ROOT, asked.unsloth_site), "tiny": asked.tiny, "pace": asdict(pace)}
    harness = Harness(
        asked.out.resolve(), about, pace, tiny=asked.tiny, limit=asked.limit, deadline=deadline,
        unsloth_site=asked.unsloth_site and asked.unsloth_site.resolve(), in_use=nvml_memory(),
    )  # fmt: skip
    if asked.resume:
        harness.measurements |= taken_over(asked.out / "speed.json", about)
    chosen = tuple(row for row in ROWS if not asked.rows or row.name in asked.rows.split(","))
    for label in asked.cases or cases_of(chosen):
        if label not in harness.measurements:
            print("RESULT " + json.dumps({"case": label, **harness.measure(label)}), flush=True)
    harness.write()
    if not asked.cases:
        print(text_table(harness.told()))


if __name__ == "__main__":
    main()
