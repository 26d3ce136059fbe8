"""Does this rank get on? A thread that knows what the rank is doing, since when, and how long that may take."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from shardtune.run.channel import LAUNCHER_VARIABLE, Channel, put_message
from shardtune.run.exit_codes import LOST, NO_PROGRESS
from shardtune.run.failure import record_failure, three_parts
from shardtune.run.stacks import stack_dump_handlers

if TYPE_CHECKING:
    from shardtune.config.schema import ParallelSection

_INTERVAL = 0.5  # seconds between two looks
_FAREWELL = 5.0  # seconds for the thread to end
CRASH_FOLDER = "crash"

# What a rank may be doing, and which of the limits it is held to. Preparing data has none: one process works as long as
# the data is large while the others wait for its file; that it lives is watched all the same.
STARTING = "starting"
JOINING = "joining the other ranks"
PREPARING = "preparing data"
LOADING = "loading the model"
BATCH = "reading a batch of data"
STEP = "computing a step"
EVALUATING = "evaluating"
SAVING = "saving a checkpoint"
ENDING = "writing the final adapter"


class EventWriter(Protocol):
    """What a watchdog needs of an event log."""

    def write(self, event: str, **fields: object) -> None: ...

    def release(self) -> None: ...


class PhaseLimits(Protocol):
    """Seconds without progress that are too many."""

    @property
    def longest(self) -> float: ...

    def of_phase(self, phase: str) -> float | None: ...


@dataclass(frozen=True)
class Limits:
    """Seconds without progress that are too many."""

    load: float
    step: float
    checkpoint: float

    @classmethod
    def of(cls, section: ParallelSection) -> Limits:
        return cls(
            load=60 * section.load_timeout_minutes,
            step=60 * section.step_timeout_minutes,
            checkpoint=60 * section.checkpoint_timeout_minutes,
        )

    def of_phase(self, phase: str) -> float | None:
        return {
            STARTING: self.load, JOINING: self.load, PREPARING: None, LOADING: self.load, BATCH: self.step,
            STEP: self.step, EVALUATING: self.step, SAVING: self.checkpoint, ENDING: self.checkpoint,
        }[phase]  # fmt: skip

    @property
    def longest(self) -> float:
        return max(self.load, self.step, self.checkpoint)


class Watchdog:
    """Ends this process when its main thread has made no progress for longer than its phase allows.

    The main thread says what it begins (`enter`) and that it moves (`beat`). The thread writes both where the launcher
    can see them, twice a second; that it stops doing so tells the launcher of a process that is stopped or hangs in
    code that holds Python's lock. On a passed deadline it writes the stacks of all threads and what torch's flight
    recorder holds to `<run>/crash/`, an event, a record for the launcher, and leaves with a code of its own.
    """

    def __init__(self, rank: int, limits: PhaseLimits, environ: Mapping[str, str] = os.environ) -> None:
        self.rank, self.limits = rank, limits
        self._phase, self._step, self._since = STARTING, 0, time.monotonic()
        self._folder: Path | None = None
        self._events: EventWriter | None = None
        self._channel = Channel.inherited(environ)
        self._launcher = int(environ[LAUNCHER_VARIABLE]) if LAUNCHER_VARIABLE in environ else None
        self._stack_handlers = ExitStack()
        self._main = threading.main_thread().ident
        self._telling = threading.Lock()  # the main thread and the watchdog's own
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardtune-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._channel is not None:
            self._stack_handlers.enter_context(stack_dump_handlers(self._channel))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_FAREWELL)  # a thread that runs while the interpreter is taken down may abort the process
        self._tell_launcher()  # what it was doing last, for the record of an exception
        self._stack_handlers.close()

    def write_to(self, folder: Path, events: EventWriter) -> None:
        """Where a crash is written down, from now on."""
        self._folder, self._events = folder, events

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins something. Each step is reported at once: this process may be killed in it."""
        tell = step is not None and (step, phase) != (self._step, self._phase)
        self._phase = phase
        self.beat(step)
        if tell:
            self._tell_launcher()

    def beat(self, step: int | None = None) -> None:
        """The main thread moves."""
        self._step = self._step if step is None else step
        self._since = time.monotonic()

    @property
    def doing(self) -> str:
        return self._phase + (f" (step {self._step})" if self._phase in (BATCH, STEP, EVALUATING, SAVING) else "")

    def _watch(self) -> None:
        self._tell_launcher()
        while not self._ended.wait(_INTERVAL):
            self._tell_launcher()
            if self._launcher is not None and os.getppid() != self._launcher:
                with suppress(OSError):  # whoever read it may have gone with the launcher
                    print(f"rank {self.rank}: the launcher is gone, so this process ends.", file=sys.stderr, flush=True)
                os._exit(LOST)
            self.look()
            limit = self.limit
            if limit is not None and time.monotonic() - self._since > limit:
                self._give_up(limit)

    @property
    def limit(self) -> float | None:
        """Seconds that what it is doing may take without progress; None: as long as it likes."""
        return self.limits.of_phase(self._phase)

    limit_named = ""  # for the message: which setting it is

    @property
    def begun(self) -> bool:
        """Whether it has reached its first step, and stops on request with something saved."""
        return self._phase not in (STARTING, JOINING, PREPARING, LOADING)

    def look(self) -> None:
        """Called at every look, for signs of progress that the main thread does not report."""

    def _tell_launcher(self) -> None:
        if self._channel is not None:
            state = {
                "pid": os.getpid(), "doing": self.doing, "alive": time.monotonic(), "since": self._since,
                "limit": self.limit, "silence": self.limits.longest,
                "folder": str(self._folder) if self._folder else "", "trains": self.begun,
            }  # fmt: skip
            # Not even memory: the next look tries again, and the launcher waits that long.
            with suppress(OSError), self._telling:
                put_message(self._channel.state, state)

    def _give_up(self, limit: float) -> NoReturn:
        """Runs in the watchdog's thread; the main thread is still wherever it hangs."""
        try:
            self._tell_no_progress(limit)
        except Exception:  # noqa: BLE001 - whatever telling it meets, the process ends: nobody else would end it
            traceback.print_exc()
        finally:
            with suppress(OSError):  # printed to a full disk
                sys.stderr.flush()
            os._exit(NO_PROGRESS)

    def _tell_no_progress(self, limit: float) -> None:
        """To the launcher first, which needs no disk; a crash folder on a dead mount may not come back."""
        doing, stack = self.doing, self.main_stack()
        last = stack[-1] if stack else None
        text = f"No progress for {limit:.0f} s{self.limit_named}" + (
            f", in {last.name} ({last.filename}:{last.lineno})." if last else "."
        )
        # By its stack, not its phase: ranks also wait for each other while they count the tokens of a batch.
        kind = "waiting" if waits_for_others(stack) else "stalled"
        has_launcher = record_failure(self.rank, kind, text, NO_PROGRESS, doing)
        where = self._dump()
        if not has_launcher:
            said = "waited for other ranks" if kind == "waiting" else "hung"
            print(three_parts(f"Rank {self.rank} {said} while {doing}.", text, f"Its stack: {where}"), file=sys.stderr)
        if self._events is not None:
            self._events.release()  # a start that hangs before it resumes its run has failed, not been refused
            self._events.write("no_progress", doing=doing, limit_seconds=limit, kind=kind, text=text, stacks=where)

    def main_stack(self) -> list[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._main or 0)
        return list(traceback.extract_stack(frame)) if frame is not None else []

    def _dump(self) -> str:
        """Stacks of all threads, and NCCL's flight recorder; returns the file."""
        if self._folder is None:
            faulthandler.dump_traceback(all_threads=True)
            return "above"
        folder = self._folder / CRASH_FOLDER
        try:
            folder.mkdir(exist_ok=True)
            target = folder / f"rank-{self.rank}.txt"
            with target.open("w", encoding="utf-8") as file:
                file.write(f"rank {self.rank}, {self.doing}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
            (folder / f"rank-{self.rank}-collectives.json").write_bytes(_flight_recorder())
        except OSError as error:
            return f"not written ({error.strerror})"
        return str(target)


def waits_for_others(stack: list[traceback.FrameSummary]) -> bool:
    """Is the innermost code that of torch's collectives?"""
    return any("torch/distributed/" in frame.filename for frame in stack[-6:])


def _flight_recorder() -> bytes:
    """The last collectives of this rank as torch's recorder kept them (JSON); empty where torch has none."""
    from torch._C import _distributed_c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # today's name, and that of torch 2.11
        if hasattr(_distributed_c10d, name):
            return bytes(getattr(_distributed_c10d, name)())
    return b"{}"
