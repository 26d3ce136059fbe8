"""How are the processes of this node doing? Started, polled, signalled, inspected when they hang, and killed here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.launch.rank_output import RankOutput, log_path
from shardtune.machine import oom_kills
from shardtune.run.channel import LAUNCHER_VARIABLE, Channel, read_message
from shardtune.run.exit_codes import stop_signal
from shardtune.run.findings import Finding
from shardtune.run.node_facts import STORE_VARIABLE
from shardtune.run.stacks import dump_stacks

STORE_PORT_VARIABLE = "SHARDTUNE_STORE_PORT"  # of that store, on loopback
_LATE = 5.0  # seconds past its deadline after which a rank's own watchdog counts as stuck, too


@dataclass(frozen=True)
class RankAssignment:
    """Which ranks of which run this node starts, and where they find each other."""

    attempt: int
    node: int
    nnodes: int
    first_rank: int
    nproc: int
    world_size: int
    master_addr: str
    master_port: int
    store_port: int  # on this node's loopback
    host: str


class LocalWorkers:
    """The processes of this node in one attempt, and what they report to this launcher (`channel.py`)."""

    def __init__(
        self,
        command: list[str],
        assignment: RankAssignment,
        environ: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        output: RankOutput | None = None,
    ) -> None:
        """Args:
        variables: Set over those of the assignment.
        output: Where what the ranks print goes; None: where this process prints.
        """
        self.assignment, self._output = assignment, output
        pipe, nothing = (None, None) if output is None else (subprocess.PIPE, subprocess.DEVNULL)
        self._channels: dict[int, Channel] = {}
        self._states: dict[int, dict[str, Any]] = {}  # the last that could be read
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, float] = {}  # when a rank was first seen to be gone
        self._inspected: dict[int, Finding] = {}
        self._oom_kills = oom_kills()
        for local in range(assignment.nproc):
            rank = assignment.first_rank + local
            self._channels[rank] = channel = Channel.create()
            # A process group of its own: Ctrl-C reaches it once, through us, and its data loaders end with it.
            # From the main thread: a rank ends with the thread that started it (`end_with_launcher`).
            self._processes[rank] = subprocess.Popen(
                command,
                env={**environ, **self._environment(local), **(variables or {}), **channel.environment()},
                pass_fds=channel.files,
                process_group=0,
                stdin=nothing,  # a process group of its own may not read the terminal
                stdout=pipe,
                stderr=pipe,
            )
        if output is not None:
            output.follow(self._processes.items())

    def _environment(self, local: int) -> dict[str, str]:
        own = self.assignment
        return {
            "RANK": str(own.first_rank + local), "WORLD_SIZE": str(own.world_size), "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(own.nproc), "GROUP_RANK": str(own.node), "MASTER_ADDR": own.master_addr,
            "MASTER_PORT": str(own.master_port), STORE_VARIABLE: f"attempt{own.attempt}",
            STORE_PORT_VARIABLE: str(own.store_port), LAUNCHER_VARIABLE: str(os.getpid()),
        }  # fmt: skip

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended (negative: by a signal)."""
        found = {rank: code for rank, process in self._processes.items() if (code := process.poll()) is not None}
        for rank in found:
            self._ended.setdefault(rank, time.time())
        return found

    @property
    def is_script(self) -> bool:
        """Whether the ranks run a user's script, whose output goes to logs."""
        return self._output is not None

    def send(self, number: int) -> None:
        """Forward a signal to every rank that is alive."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def hung(self) -> list[int]:
        """Ranks whose deadline is long past, or whose own watchdog has not run for as long."""
        codes, now = self.codes(), time.monotonic()
        return [rank for rank in self._processes if rank not in codes and self._is_hung(self._state(rank), now)]

    def _is_hung(self, state: dict[str, Any], now: float) -> bool:
        if not state:  # not even its watchdog has begun: imports
            return False
        limit = state["limit"] if state["limit"] is not None else state["silence"]
        overdue = state["limit"] is not None and now - state["since"] > limit + _LATE
        return bool(overdue or now - state["alive"] > limit + _LATE)

    def findings(self) -> list[Finding]:
        """What is known of every rank that has failed or hangs. Ranks that still run are inspected, not ended."""
        codes = self.codes()
        found = [finding for rank in self._processes if (finding := self._finding(rank, codes))]
        return sorted(found, key=lambda finding: finding.time)

    def _finding(self, rank: int, codes: dict[int, int]) -> Finding | None:
        state, record = self._state(rank), read_message(self._channels[rank].failure)
        doing = str(state.get("doing", ""))
        if record is not None:
            stack = str(Path(state["folder"]) / "crash" / f"rank-{rank}.txt") if state.get("folder") else ""
            return self._make_finding(
                rank, record["kind"], record["time"], text=record["text"], exit_code=record["exit_code"],
                doing=record["doing"] or doing, stack=stack, error_code=record["error_code"],
            )  # fmt: skip
        if rank in codes:
            code = codes[rank]
            if code == 0 and self.is_script:
                return self._make_finding(rank, "finished", self._ended[rank])
            if code == 0 or stop_signal(code) is not None:
                return None
            if code < 0:
                counted = self._killed_for_memory(-code)
                return self._make_finding(
                    rank, "killed", self._ended[rank], exit_code=128 - code, doing=doing, for_memory=counted
                )
            log = str(log_path(self._output.folder, rank)) if self._output is not None else ""
            return self._make_finding(rank, "exited", self._ended[rank], exit_code=code, doing=doing, text=log)
        return self._inspected.get(rank) or self._inspect(rank, state)

    def _killed_for_memory(self, number: int) -> bool | None:
        """Whether the cgroup counts this SIGKILL as an out-of-memory kill; None where nobody counts."""
        before, now = self._oom_kills, oom_kills()
        if number != signal.SIGKILL or before is None or now is None:
            return None
        return now > before

    def _make_finding(self, rank: int, kind: str, when: float, **more: Any) -> Finding:
        return Finding(kind, when, self.assignment.node, self.assignment.host, rank, **more)

    def _inspect(self, rank: int, state: dict[str, Any]) -> Finding | None:
        """Is a rank that is alive the one the others wait for? A stopped one is; one whose watchdog is silent, too."""
        process = self._processes[rank]
        letter, sleeping = _kernel_view(process.pid)
        now = time.monotonic()
        silent_for = now - state["alive"] if state else 0.0
        stopped = letter in ("T", "t")
        if not stopped and silent_for < _LATE and not self._is_hung(state, now):
            return None
        since = time.time() - silent_for
        stack = self._ask_for_stacks(rank, state, f"kernel state {letter}, waiting in {sleeping}")
        text = f"Its watchdog last ran {silent_for:.0f} s ago (kernel state {letter}, waiting in {sleeping})."
        self._inspected[rank] = self._make_finding(
            rank, "stopped" if stopped else "silent", since, text=text, doing=str(state.get("doing", "")), stack=stack
        )
        return self._inspected[rank]

    def _ask_for_stacks(self, rank: int, state: dict[str, Any], seen: str) -> str:
        """Dump the stacks of a rank whose watchdog no longer runs, into the file it would have written itself, and
        kill it."""
        if not state.get("folder"):
            return ""
        process, asked = self._processes[rank], time.time()
        stacks = dump_stacks(process.pid, self._channels[rank])
        if not stacks:
            return ""
        self._kill(process)
        target = Path(state["folder"]) / "crash" / f"rank-{rank}.txt"
        text = f"rank {rank}, {state['doing']}, inspected by its launcher: {seen}\n{stacks}"
        # When it is continued, its own watchdog may run first: it writes that file, and ends the process.
        with suppress(OSError):
            if target.stat().st_mtime > asked - 1:
                text += f"\nWritten by the rank itself:\n{target.read_text(encoding='utf-8', errors='replace')}"
        try:
            target.parent.mkdir(exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"Could not write {target} ({error.strerror}):\n{text}", file=sys.stderr, flush=True)
            return "above"
        return str(target)

    def folder_of_run(self) -> Path | None:
        """Where the ranks write, once one of them has reported it."""
        for rank in self._processes:
            if folder := self._state(rank).get("folder"):
                return Path(folder)
        return None

    def has_begun_training(self) -> bool:
        """Whether a rank has reached its first step."""
        return any(self._state(rank).get("trains") for rank in self._processes)

    def kill(self) -> None:
        """End every process of this node, with its data loaders, and wait until they are gone."""
        for process in self._processes.values():
            self._kill(process)
        for process in self._processes.values():
            process.wait()
        self.codes()
        if self._output is not None:
            self._output.finish()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # gone, and its data loaders with it
            return

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            channel.close()

    def _state(self, rank: int) -> dict[str, Any]:
        """What the rank's watchdog wrote last; empty before it has begun."""
        self._states[rank] = read_message(self._channels[rank].state) or self._states.get(rank, {})
        return self._states[rank]


def _kernel_view(pid: int) -> tuple[str, str]:
    """State letter (R, S, D, T stopped, Z) and the kernel function a process sleeps in, where /proc shows it."""
    letter, sleeping = "?", "an unknown function"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()[0]
        sleeping = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n") or sleeping
    except (OSError, IndexError):
        pass
    return letter, sleeping
