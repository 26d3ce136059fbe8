"""Three machines on one: network namespaces joined by a bridge, or plain loopback where that is not allowed.

The bridge lives in a namespace of its own, so that nothing of this machine's network is ever touched. Names carry the
process's number: two test runs side by side do not meet. Leaving the `with` block ends every process of every node and
removes every namespace, whatever happened in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from ranks import free_ports
from running import REPOSITORY

_number = count()
_FRAME_BYTES = 1514  # Ethernet
TOY_NODE = Path(__file__).with_name("toy_node.py")


def why_no_namespaces() -> str | None:
    """Why nodes cannot have networks of their own here; None when they can."""
    if shutil.which("ip") is None:
        return "the command `ip` (package iproute2) is missing"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"st{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"`ip netns add` is refused here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


def why_no_token_bucket() -> str | None:
    """Why links cannot be limited by the kernel here; None when they can. Needs namespaces."""
    if shutil.which("tc") is None:
        return "the command `tc` (package iproute2) is missing"
    with Cluster(1, namespaces=True) as cluster:
        try:
            cluster.limit(1e9)
        except RuntimeError as error:
            return str(error)
    return None


def free_port() -> int:
    return free_ports(1)[0]


class Machine:
    """One node: a place to start processes in, and what became of the launcher that was started there last."""

    def __init__(self, number: int, folder: Path, namespace: str | None) -> None:
        self.number, self.namespace = number, namespace
        self.log = folder / f"node-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        with self.log.open("ab") as log:
            # `ip netns exec` becomes the command: the process we get is the launcher itself.
            self.process = subprocess.Popen(
                [*prefix, *command], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def pids(self) -> list[int]:
        """Every living process of this node, the launcher first."""
        if self.namespace:
            told = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
            return [pid for pid in map(int, told.stdout.split()) if not _is_zombie(pid)]
        return list(_tree(self.process.pid)) if self.process else []

    def worker(self, rank: int) -> int:
        """The process that is this rank."""
        for pid in self.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if f"RANK={rank}".encode() in environ and b"toy_node" not in command:
                return pid
        raise AssertionError(f"rank {rank} does not run on node {self.number}")

    def kill(self) -> None:
        """As if the power failed: every process at once."""
        for pid in self.pids():
            _kill(pid)
        if self.process is not None:
            self.process.wait(timeout=20)


class Cluster:
    """`nodes` machines. `.address` is where node 0 is reached."""

    def __init__(self, nodes: int = 3, *, namespaces: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardtune-cluster-"))
        self.name = f"st{os.getpid()}x{next(_number)}"
        self.hub = f"{self.name}hub" if namespaces else None
        self.machines = [
            Machine(number, self.folder, f"{self.name}n{number}" if namespaces else None) for number in range(nodes)
        ]
        self.address, self.port = ("10.77.0.1", 29500) if namespaces else ("127.0.0.1", free_port())
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        if self.hub:
            try:
                self._wire()
            except BaseException:
                self._remove()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            for machine in self.machines:
                print(f"--- node {machine.number}\n{machine.said()[-3000:]}")
        self._remove()

    def _wire(self) -> None:
        assert self.hub
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")
        for machine in self.machines:
            name, port = str(machine.namespace), f"p{machine.number}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", self.hub)
            _ip("-n", name, "addr", "add", f"10.77.0.{machine.number + 1}/24", "dev", "net0")
            _ip("-n", name, "link", "set", "net0", "up")
            _ip("-n", self.hub, "link", "set", port, "master", "bridge")
            _ip("-n", self.hub, "link", "set", port, "up")

    def _remove(self) -> None:
        for machine in self.machines:
            if machine.namespace is None or _exists(machine.namespace):
                machine.kill()
            elif machine.process is not None:
                machine.process.kill()
        for name in [str(machine.namespace) for machine in self.machines if machine.namespace] + [self.hub or ""]:
            if name and _exists(name):
                _ip("netns", "delete", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def partition(self, node: int) -> None:
        """Pull the cable of a node."""
        _ip("-n", str(self.hub), "link", "set", f"p{node}", "down")

    def heal(self, node: int) -> None:
        _ip("-n", str(self.hub), "link", "set", f"p{node}", "up")

    def delay(self, node: int, milliseconds: int) -> bool:
        """Slow the cable of a node down; False where the kernel has no netem."""
        made = subprocess.run(
            ["tc", "-n", str(self.hub), "qdisc", "replace", "dev", f"p{node}", "root", "netem", "delay",
             f"{milliseconds}ms"], capture_output=True, check=False,
        )  # fmt: skip
        return made.returncode == 0

    def limit(self, bits_per_second: float | None) -> None:
        """Let every node send and receive no faster than this from now on; None lifts the limit."""
        for machine in self.machines:
            _limit(str(machine.namespace), "net0", bits_per_second)  # what it sends
            _limit(str(self.hub), f"p{machine.number}", bits_per_second)  # what it receives

    def start_toy(self, node: int, *, nproc: int = 1, nnodes: int | None = None, rank: int | None = None,
                  env: dict[str, str] | None = None, **parallel: Any) -> None:  # fmt: skip
        """Start the launcher of a node with the toy worker; `parallel` are settings of that section."""
        section = {"device": "cpu", "step_timeout_minutes": 0.1, "node_timeout_seconds": 6, **parallel}
        environment = {
            **self.environment, "TOY_FOLDER": str(self.folder / "run"), "TOY_PARALLEL": json.dumps(section),
            "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {}),
        }  # fmt: skip
        words = [nnodes or len(self.machines), node if rank is None else rank, nproc, self.address, self.port]
        self.machines[node].start([sys.executable, str(TOY_NODE), *map(str, words)], environment)

    def start_all_toys(self, **options: Any) -> None:
        for machine in self.machines:
            self.start_toy(machine.number, **options)

    def wait_for_step(self, step: int, ranks: int, seconds: float = 90) -> None:
        """Until every rank has come to the step."""

        def there() -> bool:
            files = [self.folder / "run" / f"step-{rank}" for rank in range(ranks)]
            return all(file.exists() and int(file.read_text() or "-1") >= step for file in files)

        self.wait(there, seconds, f"step {step}")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                written = [machine.log for machine in self.machines if machine.log.exists()]
                logs = [log.read_text(encoding="utf-8", errors="replace")[-2000:] for log in written]
                raise AssertionError("\n".join([f"{what} did not happen within {seconds} s", *logs]))
            time.sleep(0.05)

    def ended(self, node: int, seconds: float) -> int:
        """The exit code of a node's launcher, which must come within `seconds` and leave no process behind."""
        machine = self.machines[node]
        assert machine.process is not None
        code = machine.process.wait(timeout=seconds)
        self.wait(lambda: not machine.pids(), 5, f"the end of the processes {machine.pids()} of node {node}")
        return code


def environment_of_tests() -> dict[str, str]:
    """This process's, without what a scheduler would have set, with the package and the tests on the path."""
    kept = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PET_", "SHARDTUNE_", "GLOO_", "SLURM_")) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }  # fmt: skip
    paths = (REPOSITORY, REPOSITORY / "tests", *filter(None, [kept.get("PYTHONPATH")]))
    path = ":".join(map(str, paths))
    return {**kept, "PYTHONPATH": path, "SHARDTUNE_SECRET": "the secret of a test cluster"}


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _limit(namespace: str, device: str, bits_per_second: float | None) -> None:
    """What a device sends leaves at this rate: in bursts of a millisecond, so that no message gets through for free."""
    words = ["tc", "-n", namespace, "qdisc"]
    if bits_per_second is None:
        subprocess.run([*words, "delete", "dev", device, "root"], capture_output=True)  # refused where there is none
        return
    burst = max(2 * _FRAME_BYTES, int(bits_per_second / 8 / 1000))
    bucket = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", "50ms"]
    done = subprocess.run([*words, "replace", "dev", device, "root", *bucket], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"tc {' '.join(bucket)}: {done.stderr.strip()}")


def _exists(namespace: str) -> bool:
    return Path("/run/netns", namespace).exists() or Path("/var/run/netns", namespace).exists()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it that live."""
    try:
        if not _is_zombie(pid):
            yield pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
