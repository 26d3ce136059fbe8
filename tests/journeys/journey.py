"""What a journey starts with, and how it goes: an empty HOME, cold caches, and the console script that `pip install` puts on the PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# What a login shell has. Everything else (caches, rank variables, PYTHONPATH) is left behind on purpose.
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Journey:
    """A new user on a new machine.

    Attributes:
        folder: Where commands are typed.
        home: HOME, empty at the start.
    """

    folder: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        scripts = str(Path(sys.executable).parent)
        return {
            **kept, "HOME": str(self.home), "PATH": f"{scripts}:{kept.get('PATH', '')}", "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def command(
        self, *argv: object, env: Mapping[str, str] | None = None, expect: int = 0, timeout: float = 500
    ) -> subprocess.CompletedProcess[str]:
        """Type a command and wait for it; its exit code must be the one that is expected."""
        done = subprocess.run(
            [str(word) for word in argv], cwd=self.folder, env={**self.environment, **(env or {})},
            capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr + done.stdout or expect not in (0, 2), done.stderr
        return done

    def shardtune(self, *argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.command("shardtune", *argv, **options)

    def write_config(self, name: str = "run.yaml", /, **sections: Mapping[str, Any]) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return path

    def runs(self, output_dir: str = "runs") -> list[Path]:
        """Run folders, oldest first."""
        return sorted(path.parent for path in (self.folder / output_dir).glob("*/config.yaml"))

    def only_run(self, output_dir: str = "runs") -> Path:
        (run,) = self.runs(output_dir)
        return run


def read_events(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run / f"events-rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
