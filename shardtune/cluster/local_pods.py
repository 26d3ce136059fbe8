"""Does what the manifests say really run? The pods that a controller would make of them, as processes of this machine.

With root and the command `ip` each pod has a network, files, a host name, process numbers and limits of its own; else
its command is started as a plain process, with paths and the master's address replaced. Pods are not restarted.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from shardtune.cluster import pod_process
from shardtune.cluster.controllers import expand
from shardtune.cluster.local_pod import (
    BIN,
    LocalContainer,
    LocalPod,
    Volumes,
    as_json,
    copy_with_paths,
    local_pods,
    replace_paths,
    write_stand_in,
)
from shardtune.cluster.manifests import Manifests
from shardtune.cluster.pod_limits import Cgroups
from shardtune.errors import ShardtuneError, UserInputError

_START_SECONDS = 30.0  # for a pod's namespaces
_OTHERS_SECONDS = 20.0  # for the other pods to end by themselves after one has failed
_SCHEDULING = ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName",
               "schedulerName", "serviceAccountName", "imagePullSecrets")  # fmt: skip


def run_local_pods(
    manifests: Manifests,
    kind: str,
    *,
    volumes: Mapping[str, Path],
    work_folder: Path,
    out: IO[str] = sys.stdout,
    secrets: Path | None = None,
    namespaces: bool | None = None,
) -> int:
    """Run the pods of a rendered job until all have ended; returns the exit code of the first that failed.

    SIGINT and SIGTERM are passed on as a SIGTERM, as when a pod is deleted; SIGKILL follows after the grace period.

    Args:
        kind: trainjob, pytorchjob, jobset or job, for the messages.
        volumes: Folder of each PersistentVolumeClaim; one is made under `work_folder` for each that is not here.
        secrets: A folder with the Secrets that the job refers to, as files `SECRET/KEY`.
        namespaces: Whether pods are kept apart; None = where it is possible.

    Raises:
        UserInputError: the job needs what this machine does not have.
    """
    for claim, folder in volumes.items():
        if not folder.is_dir():
            raise UserInputError(f"The folder '{folder}' for the claim '{claim}' does not exist.", fix="Make it first.")
    plans = expand(manifests)
    work_folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as at_end:
        scratch = Path(tempfile.mkdtemp(prefix=f"pods-{os.getpid()}-", dir=work_folder.absolute()))
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        claims = {name: folder.absolute() for name, folder in volumes.items()}
        places = Volumes(claims, work_folder.absolute(), scratch)
        pods = local_pods(plans, manifests, places, secrets)
        say = _Lines(out)
        stop = at_end.enter_context(_stop_on_signals())
        hub = None if namespaces is False else _start_hub(at_end, say, required=bool(namespaces))
        _introduce(say, manifests, pods, places, kind)
        if unused := sorted({name for plan in plans for name in _SCHEDULING if name in plan.spec}):
            say(f"{', '.join(unused)}: without effect here")
        run = _PlainRun(say, scratch, pods) if hub is None else _IsolatedRun(say, scratch, pods, hub)
        at_end.callback(run.close)
        run.start()
        return _supervise(run, stop, say)


class _Lines:
    """What is printed, line by line: pods speak at the same time."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock = out, threading.Lock()

    def __call__(self, text: str, node: int | None = None) -> None:
        with self._lock, suppress(ValueError, OSError):  # a closed terminal
            self._out.write(f"{'local-pods:' if node is None else f'[node {node}]'} {text.rstrip()}\n")
            self._out.flush()


class _Stop:
    """How often this process was asked to stop."""

    def __init__(self) -> None:
        self.times = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.times += 1


@contextmanager
def _stop_on_signals() -> Any:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Run:
    """The processes of the pods, one for each."""

    def __init__(self, say: _Lines, scratch: Path, pods: Sequence[LocalPod]) -> None:
        self.say, self.scratch, self.pods = say, scratch, pods
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        raise NotImplementedError

    def send(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for process in self.processes.values():
            process.wait()
        self.join()

    def join(self) -> None:
        for reader in self._readers:
            reader.join(timeout=10)

    def _follow(self, pod: LocalPod, process: subprocess.Popen[bytes]) -> None:
        self.processes[pod.node_rank] = process
        reader = threading.Thread(target=self._read, args=(pod.node_rank, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, node: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                self.say(line.decode(errors="replace"), node)


class _Helper:
    """A `pod_process`: what it is told, and what it answers."""

    def __init__(self, asked: Mapping[str, Any] | None) -> None:
        self._answers, theirs = os.pipe()
        # From the main thread: the kernel ends it with the thread that has started it.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", pod_process.__file__, str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[theirs],
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.tell(json.dumps(asked))  # not in a file: it holds secrets

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has answered why
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def expect(self, answer: str) -> None:
        """Raises OSError with what it said instead."""
        ready, _, _ = select.select([self._answers], [], [], _START_SECONDS)
        said = os.read(self._answers, 4096).decode(errors="replace").strip() if ready else "no answer in time"
        if said != answer:
            raise OSError(0, said or "it ended before it answered")

    def close(self) -> None:
        os.close(self._answers)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


class _IsolatedRun(_Run):
    """Each pod in namespaces of its own. What is left of them ends with their processes."""

    def __init__(self, say: _Lines, scratch: Path, pods: Sequence[LocalPod], hub: _Helper) -> None:
        super().__init__(say, scratch, pods)
        self._hub, self._cgroups = hub, Cgroups()
        self._helpers: list[_Helper] = []

    def start(self) -> None:
        files = self._files()
        limits = self._limits()
        for pod in self.pods:
            helper = _Helper(as_json(pod, self.scratch, files[pod.node_rank], limits[pod.node_rank]))
            self._helpers.append(helper)
            self._follow(pod, helper.process)
        try:
            for pod, helper in zip(self.pods, self._helpers, strict=True):
                helper.expect("ready")
                self._hub.tell(f"{helper.process.pid} pod{pod.node_rank}")
                self._hub.expect("linked")
        except OSError as error:
            raise ShardtuneError(
                f"The namespaces of {pod.name} could not be made: {error.strerror or error}.",
                fix="Run it where it may make them, or pass --no-namespaces for plain processes.",
            ) from None
        for helper in self._helpers:
            helper.tell("go")

    def close(self) -> None:
        super().close()
        for helper in self._helpers:
            helper.close()
        self._cgroups.close()

    def _limits(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {pod.node_rank: [] for pod in self.pods}
        try:
            for pod in self.pods:
                name = f"shardtune-{os.getpid()}-{self.scratch.name[-8:]}-{pod.node_rank}"
                found[pod.node_rank] = self._cgroups.limit(name, pod.memory, pod.cpus)
        except (OSError, KeyError) as error:
            self._cgroups.close()
            self.say(f"memory and CPU limits are not applied: no cgroup can be made here ({error})")
            return {pod.node_rank: [] for pod in self.pods}
        return found

    def _files(self) -> dict[int, dict[str, Path]]:
        """/etc/hosts with the names of all pods, a resolver that asks nobody, and our command."""
        others = [f"{pod.address} {' '.join(pod.names)}" for pod in self.pods if pod.names]
        command = write_stand_in(self.scratch / "bin")
        (self.scratch / "resolv.conf").write_text("search svc.cluster.local cluster.local\n", encoding="utf-8")
        found = {}
        for pod in self.pods:
            folder = self.scratch / pod.hostname
            folder.mkdir(exist_ok=True)
            lines = ["127.0.0.1 localhost", "::1 localhost", f"{pod.address} {pod.hostname}", *others]
            (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
            (folder / "hostname").write_text(f"{pod.hostname}\n", encoding="utf-8")
            found[pod.node_rank] = {
                "/etc/hosts": folder / "hosts", "/etc/hostname": folder / "hostname",
                "/etc/resolv.conf": self.scratch / "resolv.conf", BIN: command,
            }  # fmt: skip
        return found


class _PlainRun(_Run):
    """Each pod is a process of this machine. Nothing is mounted: paths and addresses are replaced by those here."""

    def start(self) -> None:
        names = {name: "127.0.0.1" for pod in self.pods for name in pod.names}
        port = str(_free_port())
        command = write_stand_in(self.scratch / "bin")
        for pod in self.pods:
            if len(pod.containers) > 1:
                self.say(f"not run: init container {', '.join(one.name for one in pod.containers[:-1])}", None)
            container = pod.containers[-1]
            places = self._places(pod, container)
            env = {name: names.get(value, replace_paths(value, places)) for name, value in container.env.items()}
            env |= {name: port for name in env if name.endswith("MASTER_PORT")}
            env |= {"PATH": env["PATH"].replace(BIN, str(command)), "HOME": str(self._folder(pod, "home"))}
            working = replace_paths(container.folder, places)
            folder = Path(working) if Path(working).is_dir() and working != "/" else self._folder(pod, "cwd")
            try:
                process = subprocess.Popen(
                    [replace_paths(names.get(word, word), places) for word in container.command], env=env, cwd=folder,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ShardtuneError(f"The command of {pod.name} cannot be started: {error}.") from None
            self._follow(pod, process)

    def kill(self) -> None:
        """All that the pods have started and that is still in their process groups; ranks end with their launcher."""
        for process in self.processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _folder(self, pod: LocalPod, name: str) -> Path:
        folder = self.scratch / pod.hostname / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _places(self, pod: LocalPod, container: LocalContainer) -> dict[str, Path]:
        mounts = [mount for mount in container.mounts if mount.path != "/dev/shm"]
        places = {mount.path: mount.source for mount in mounts}
        volumes = self.scratch / pod.hostname / "volumes"
        for mount in mounts:
            if mount.read_only and volumes in mount.source.parents:  # a ConfigMap: run.yaml names paths, too
                copy = self.scratch / pod.hostname / "files" / mount.source.name
                copy_with_paths(mount.source, copy, dict(places))
                places[mount.path] = copy
        return places


def _start_hub(at_end: ExitStack, say: _Lines, *, required: bool) -> _Helper | None:
    """The switch between the pods' networks; None where pods cannot be kept apart, which is said."""
    problem = None
    if sys.platform != "linux" or os.geteuid() != 0:
        problem = "it needs Linux and root"
    elif shutil.which("ip") is None:
        problem = "the command `ip` (package iproute2) is missing"
    if problem is None:
        hub = _Helper(None)
        at_end.callback(_end_hub, hub)
        try:
            hub.expect("ready")
            return hub
        except OSError as error:
            problem = str(error.strerror or error)
    if required:
        raise UserInputError(f"The pods cannot be kept apart on this machine: {problem}.")
    say(
        f"plain processes, because pods cannot be kept apart here ({problem}). Not as in the manifest: mounted paths "
        "are replaced by those of their folders, addresses by 127.0.0.1; host names, users, limits, /dev/shm and "
        "read-only mounts are this machine's"
    )
    return None


def _end_hub(hub: _Helper) -> None:
    hub.process.kill()
    hub.close()
    hub.process.wait()
    assert hub.process.stdout is not None
    hub.process.stdout.close()


def _introduce(say: _Lines, manifests: Manifests, pods: Sequence[LocalPod], volumes: Volumes, kind: str) -> None:
    say(f"{len(pods)} pod{'s' if len(pods) > 1 else ''} of the {kind} {manifests.name}; they are not restarted")
    for pod in pods:
        say(f"node {pod.node_rank} is {pod.name}")
    for name in dict.fromkeys(name for pod in pods for name in pod.skipped):
        say(f"not run: init container {name}, which is of another image")
    for claim, folder in volumes.claims.items():
        say(f"claim {claim} is {folder}")


def _supervise(run: _Run, stop: _Stop, say: _Lines) -> int:
    """Until every pod has ended. One that fails ends the others, as its controller would; so does a signal."""
    grace = max((pod.grace_seconds for pod in run.pods), default=0)
    ended: dict[int, int] = {}
    failed: int | None = None
    terminate_at: float | None = None  # then a SIGTERM is sent
    kill_at: float | None = None
    while len(ended) < len(run.processes):
        for node, process in run.processes.items():
            code = process.poll()
            if code is None or node in ended:
                continue
            ended[node] = code if code >= 0 else 128 - code
            if ended[node] and failed is None:
                failed, terminate_at = ended[node], time.monotonic() + _OTHERS_SECONDS
        now = time.monotonic()
        if kill_at is None and (stop.times or (terminate_at is not None and now > terminate_at)):
            run.send(signal.SIGTERM)
            kill_at = now + grace
        if kill_at is not None and (now > kill_at or stop.times > 1):
            run.kill()
        time.sleep(0.05)
    run.join()
    for pod in run.pods:
        say(f"{pod.name} ended with exit code {ended[pod.node_rank]}")
    return failed or 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
