"""How does a measurement begin without importing everything once more? As the child of a process that has it imported.

`Forks.run` does what `apart.run_apart` does, for commands of this Python: a server imports the libraries once, touches
no device, and forks for each command. The child is a session of its own; its memory on the device ends with it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apart import Ended, end_leader

IMPORTED = ("torch._inductor.compile_fx", "transformers", "peft", "trl", "datasets", "shardtune.train.run")


@dataclass
class Forks:
    """A server, started when it is first needed.

    Args:
        imported: Modules it imports.
    """

    imported: Sequence[str] = IMPORTED
    _server: subprocess.Popen[str] | None = field(default=None, init=False)

    def run(self, command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]) -> Ended:
        """Run `command` (this Python, then a script or `-m` and a module), its output in `log`."""
        server = self._server or self._begin(environment)
        began = time.monotonic()
        told = {"argv": list(command[1:]), "log": str(log), "environment": dict(environment)}
        pid = self._ask(server, told)["pid"]
        try:
            code = self._wait(server, limit)
        finally:
            end_leader(pid)
        if code is None:
            self._wait(server, 60.0)
        return Ended(code, time.monotonic() - began)

    def close(self) -> None:
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()  # it ends when nothing more can come
            self._server.wait(timeout=30)
            self._server = None

    def _begin(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        self._server = subprocess.Popen(
            [sys.executable, __file__, *self.imported], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=dict(environment),
        )  # fmt: skip
        return self._server

    @staticmethod
    def _ask(server: subprocess.Popen[str], told: dict[str, Any]) -> dict[str, Any]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(told) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"The server of measurements ended with {server.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _wait(server: subprocess.Popen[str], limit: float) -> int | None:
        """The exit code, or None where it has not ended within the limit."""
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], limit)
        return int(json.loads(server.stdout.readline())["code"]) if ready else None


def serve(imported: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    for module in imported:
        importlib.import_module(module)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(told)
            sys.exit()  # an exception ends the child as it ends any program
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)


def _become(told: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, replaced in ((0, nothing), (1, log), (2, log)):
        os.dup2(replaced, number)
    os.environ.clear()
    os.environ.update(told["environment"])
    first, *rest = told["argv"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1:])
