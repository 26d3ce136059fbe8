"""What runs in a rank's process? The user's script, as `python script.py` would run it, watched and recorded."""

from __future__ import annotations

import gc
import io
import os
import platform
import runpy
import signal
import socket
import sys
import traceback
import types
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from shardtune.errors import ShardtuneError
from shardtune.launch.rank_output import log_path
from shardtune.launch.rank_process import exit_process
from shardtune.observe import api
from shardtune.observe.environment import describe_software
from shardtune.observe.events import EventLog
from shardtune.observe.hardware import describe_hardware
from shardtune.observe.session import Session
from shardtune.run.exit_codes import DONE, FAILED, WRONG_INPUT, stopped_by
from shardtune.run.failure import kind_of, record_failure, render, three_parts
from shardtune.run.folder import FOLDER_VARIABLE, join_run_folder
from shardtune.run.stop_request import StopRequest
from shardtune.script.command import ScriptCommand
from shardtune.script.usage import UsageLog
from shardtune.script.watchdog import STARTING, ScriptLimits, ScriptWatchdog

LIMITS_VARIABLE = "SHARDTUNE_SCRIPT_LIMITS"  # seconds: load, step, and whether each was set by the user
_LAST_SECONDS = 20.0  # for threads, and for what runs at exit, of a rank that has failed
COMMAND_VARIABLE = "SHARDTUNE_COMMAND"  # the launcher's command line, for the report


class _Follower:
    """Tells the watchdog where the script is; answers whether to stop."""

    def __init__(self, watchdog: ScriptWatchdog, world_size: int) -> None:
        self.watchdog, self.world_size = watchdog, world_size
        self.stop: StopRequest | None = None
        self.stopped = False  # the script has been told to
        self._group: Any = None

    def enter(self, doing: str, step: int) -> None:
        self.watchdog.in_step = True
        self.watchdog.enter(doing, step)

    def leave(self, doing: str, step: int) -> None:
        self.watchdog.in_step = False
        self.watchdog.enter(doing, step)

    def stop_requested(self) -> bool:
        if self.stop is None:
            self.stop = StopRequest()
            self.stop.__enter__()  # until the process ends: what it replaces would only end it
            self.stop.wait_for_step()
            self.watchdog.handles_stop = True
        self.stopped = self._agree(self.stop.requested)
        return self.stopped

    @property
    def exit_code(self) -> int:
        """Of a script that was told to stop and did."""
        assert self.stop is not None
        interrupted = self.stop.signal == signal.SIGINT
        return stopped_by(signal.SIGINT if interrupted else signal.SIGTERM)

    def _agree(self, flag: bool) -> bool:
        group = self._control_group()
        if group is None:
            return flag
        import torch
        import torch.distributed as dist

        vote = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return bool(vote.item())

    def share_from_main(self, value: Any) -> Any:
        group = self._control_group()
        if group is None:
            return value
        from shardtune.parallel import exchange

        return exchange.broadcast(value, group)

    def _control_group(self) -> Any:
        """A gloo group of all ranks, which never waits for a GPU; None where the script has no process group."""
        if self.world_size == 1:
            return None
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ShardtuneError(
                f"The ranks cannot agree: this script runs on {self.world_size} ranks without a process group.",
                fix="Call torch.distributed.init_process_group() before observe.stop_requested() or load_checkpoint().",
            )
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


def run_rank(words: list[str]) -> None:
    """Run the script to its end, and end the process with its exit code."""
    command, environ = ScriptCommand.parse(words), os.environ
    rank, world_size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    folder = Path(environ[FOLDER_VARIABLE])
    join_run_folder(folder)
    watchdog = ScriptWatchdog(rank, _limits(environ))
    with ExitStack() as at_end:
        events = EventLog(folder, rank)
        at_end.callback(events.close)
        watchdog.write_to(folder, events)
        at_end.enter_context(watchdog)
        watchdog.enter(STARTING)
        _introduce(events, command, folder, world_size, is_first_here=local_rank == 0)
        usage = UsageLog(events, local_rank, environ)
        follower = _Follower(watchdog, world_size)
        session = Session(folder, rank, world_size, events, follower)
        api.install(session)
        code, failure = _run(command, follower, rank)
        if not failure:
            session.close()
        usage.close()
        if failure:
            events.write("run_failed", exit_code=code, text=failure)
        else:
            events.write("run_end", status="done" if code == DONE else "stopped", step=session.completed)
        events.finish()
    if failure:  # not long: the other ranks wait for this one, and its threads may wait for them
        exit_process(code, threads_seconds=_LAST_SECONDS, exit_seconds=_LAST_SECONDS, last=_close_files)
    exit_process(code, last=_close_files)


def _close_files() -> None:
    """What the interpreter's end would do, which `exit_process` leaves out: files that the script left open have their
    last lines in a buffer. A file that writes into another one (text into gzip into a file) is closed before it."""
    files = [found for found in gc.get_objects() if issubclass(type(found), io.IOBase)]
    for file in sorted(files, key=_depth):
        with suppress(Exception):  # of a class of the script's own, a full disk, a pipe without a reader
            if not file.closed and file.writable() and file.fileno() > 2:
                file.close()


def _depth(file: io.IOBase) -> int:
    if isinstance(file, io.TextIOBase):
        return 0
    return 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1


def _run(command: ScriptCommand, follower: _Follower, rank: int) -> tuple[int, str]:
    """The exit code of the script, and what went wrong, which is recorded for the launcher; empty if nothing did."""
    try:
        _execute(command)
    except SystemExit as end:
        if end.code not in (None, 0):
            return _refused(end.code, command, follower, rank)
    except BaseException as error:  # noqa: BLE001 - the outermost handler of a rank: recorded, and its code returned
        if not (follower.stopped and kind_of(error) == "peer_lost"):  # then the others have stopped, too
            return _failed(error, command, follower, rank)
    return (follower.exit_code if follower.stopped else DONE), ""


def _refused(given: object, command: ScriptCommand, follower: _Follower, rank: int) -> tuple[int, str]:
    """As Python itself ends after SystemExit: with a number, or a message for stderr."""
    doing = follower.watchdog.doing
    if not isinstance(given, int):
        _append_to_log(f"{given}\n", rank)
        record_failure(rank, "error", three_parts(f"{command.name} ended: {given}"), FAILED, doing)
        return FAILED, str(given)
    code = given & 0xFF
    if code == WRONG_INPUT:  # as argparse ends, and our own commands: a restart would end the same way
        log = log_path(Path(os.environ[FOLDER_VARIABLE]), rank)
        what = f"Rank {rank}: {command.name} ended with exit code {code}, as argparse does for wrong arguments."
        text = three_parts(what, fix=f"See what it printed: {log}")
        record_failure(rank, "user_error", text, code, doing)
    return code, f"{command.name} ended with exit code {code}"


def _failed(error: BaseException, command: ScriptCommand, follower: _Follower, rank: int) -> tuple[int, str]:
    if isinstance(error, ShardtuneError):
        text, code, short = render(error), error.exit_code, error.what
    else:
        trace = _from_script(error, command)
        text = "".join(traceback.format_exception(type(error), error, trace))
        if sys.excepthook is not sys.__excepthook__ and isinstance(error, Exception):  # the script's, or its tracker's
            with suppress(Exception):
                sys.excepthook(type(error), error, trace)
        code, short = FAILED, "".join(traceback.format_exception_only(error)).strip()
    _append_to_log(text, rank)
    record_failure(rank, kind_of(error), text, code, follower.watchdog.doing)
    return code, short


def _append_to_log(text: str, rank: int) -> None:
    """Not to stderr: the launcher prints the first failure of all ranks, and its consequences must not come before."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError), log_path(Path(os.environ[FOLDER_VARIABLE]), rank).open("a", encoding="utf-8") as log:
        log.write(text)


def _from_script(error: BaseException, command: ScriptCommand) -> types.TracebackType | None:
    """The traceback without the frames that started the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_globals.get("__spec__") is None and command.is_module:
        trace = trace.tb_next
    return trace or error.__traceback__


def _execute(command: ScriptCommand) -> None:
    if command.is_module:
        sys.argv = [command.target, *command.arguments]
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    path = Path(command.target).absolute()
    file = str(path)
    sys.argv = [command.target, *command.arguments]
    sys.path[0] = str(path.resolve().parent)
    module = types.ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = SourceFileLoader("__main__", file)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module  # kept to the end, for whatever is pickled to data loaders
    exec(compile(path.read_bytes(), file, "exec", dont_inherit=True), module.__dict__)


def _limits(environ: Mapping[str, str]) -> ScriptLimits:
    load, step, load_is_given, step_is_given = environ[LIMITS_VARIABLE].split(",")
    return ScriptLimits(float(load), float(step), load_is_given == "1", step_is_given == "1")


def _introduce(events: EventLog, command: ScriptCommand, folder: Path, world_size: int, *, is_first_here: bool) -> None:
    environment = {
        **describe_software(), "platform": platform.platform(), "host": socket.gethostname(), "cpus": os.cpu_count()
    }  # fmt: skip
    events.write(
        "run_start", run=folder.name, world_size=world_size, environment=environment, script=command.name,
        command=os.environ.get(COMMAND_VARIABLE, str(command)),
    )  # fmt: skip
    if is_first_here:
        events.write("hardware", **describe_hardware(folder))
