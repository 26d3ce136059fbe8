"""How is a pod kept apart from this machine? By a network, files, a host name and process numbers of its own.

`local_pods` starts this file as a program, once for each pod and once for the hub that joins their networks. It needs
root, the command `ip` and nothing but the standard library. Nothing of it outlives the process that started it: the
kernel kills each process with its parent, and namespaces end with their last process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

SUBNET = "10.244.0"  # node n has the address n + 1 in it
_SYSTEM = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sbin", "/usr")
_NEW_FILES, _NEW_HOSTNAME, _NEW_IPC, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # sys/mount.h
_DEATH_SIGNAL, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES = 1, 24, 38  # sys/prctl.h
_DEFAULT_SHM = 64 << 20  # of a container whose pod mounts nothing there
# What container runtimes leave to root: no mounts, no network settings, no locked memory.
_CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "MKNOD": 27, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
_MORE_CAPABILITIES = {"NET_ADMIN": 12, "IPC_LOCK": 14, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23,
                      "SYS_RESOURCE": 24, "PERFMON": 38}  # fmt: skip
KNOWN_CAPABILITIES = frozenset({*_CAPABILITIES, *_MORE_CAPABILITIES})
_LAST_CAPABILITY = 63
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = (kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode() if data else None)
    try:
        _call("mount", source.encode(), str(target).encode(), *encoded)
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {source} at {target}: {os.strerror(error.errno or 0)}") from None


def _bind(source: Path, target: Path, *, read_only: bool) -> None:
    _mount(str(source), target, flags=_BIND | _RECURSIVE)
    if read_only:
        _mount("none", target, flags=_BIND | _REMOUNT | _READ_ONLY)


def _make_place(root: Path, target: Path, source: Path) -> Path:
    """Where `target` is mounted under `root`."""
    place = root / str(target).lstrip("/")
    if not place.parent.resolve().is_relative_to(root) or place.is_symlink():
        raise OSError(0, f"cannot mount at {target}: a symbolic link leads elsewhere")
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return place


def _lay_out(root: Path, tree: Path, places: Sequence[Path]) -> None:
    """Show a folder of this machine read-only, with room in it for mounts at `places` that it does not have."""
    if not any(tree in place.parents and (place.is_symlink() or not place.exists()) for place in places):
        _bind(tree, _make_place(root, tree, tree), read_only=True)
        return
    (root / str(tree).lstrip("/")).mkdir(parents=True, exist_ok=True)
    for child in sorted(tree.iterdir()):
        copy = root / str(child).lstrip("/")
        if child in places:
            continue  # it will be mounted
        if child.is_symlink():
            copy.symlink_to(child.readlink())
        elif child.is_dir():
            _lay_out(root, child, places)
        elif child.is_file():
            _bind(child, _make_place(root, child, child), read_only=True)


def _make_root(root: Path, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """The files that a container sees: a system, this Python, and what the manifest mounts. Nothing else of this
    machine: a folder that the manifest forgets is missing here, too. What it writes elsewhere ends with it."""
    _mount("none", Path("/"), flags=_PRIVATE | _RECURSIVE)
    _mount("tmpfs", root, "tmpfs", data=f"mode=755{pod['disk']}")
    mounts = [(Path(mount["path"]), mount) for mount in container["mounts"]]
    places = [path for path, _ in mounts] + [Path(path) for path in pod["files"]]
    for name in ("tmp", "var/tmp"):  # before the image, whose Python may lie in one of them
        (root / name).mkdir(parents=True, exist_ok=True)
        _mount("tmpfs", root / name, "tmpfs", data="mode=1777")
    for text in [*_SYSTEM, *pod["image"]]:
        tree, copy = Path(text), root / text.lstrip("/")
        if tree.is_symlink() and text in _SYSTEM:
            copy.symlink_to(tree.readlink())
        elif tree.is_dir() and not copy.exists():
            _lay_out(root, tree, places)
    for name in ("dev", "sys", "proc"):  # the last is mounted later: it has to be of the new process numbers
        (root / name).mkdir(parents=True, exist_ok=True)
    _mount("/dev", root / "dev", flags=_BIND | _RECURSIVE)
    _mount("sysfs", root / "sys", "sysfs")
    if Path("/sys/fs/cgroup").is_dir():
        _mount("/sys/fs/cgroup", root / "sys/fs/cgroup", flags=_BIND | _RECURSIVE)
    _mount("tmpfs", root / "dev/shm", "tmpfs", data=f"mode=1777,size={_DEFAULT_SHM}")
    for path, source in pod["files"].items():
        _bind(Path(source), _make_place(root, Path(path), Path(source)), read_only=True)
    for path, mount in sorted(mounts, key=lambda pair: len(pair[0].parts)):
        source = Path(mount["source"])
        _bind(source, _make_place(root, path, source), read_only=mount["read_only"])


def _end_with_parent() -> None:
    _call("prctl", _DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def _follow(child: int) -> int:
    """The exit code of a process to which signals are passed on."""

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, forward)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _run_container(pod: Mapping[str, Any], container: Mapping[str, Any]) -> int:
    """Run a container's command as process 1 of its own process numbers, and wait for it."""
    child = os.fork()
    if child:
        return _follow(child)
    try:
        _end_with_parent()
        for folder in pod["cgroups"]:
            Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        _call("unshare", _NEW_FILES | _NEW_PIDS)
        root = Path(pod["root"])
        _make_root(root, pod, container)
        inner = os.fork()
        if inner:
            os._exit(_follow(inner))
        _end_with_parent()
        _become(root, container)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"local-pods: {container['name']} cannot be started: {error.strerror}{where}", flush=True)
    os._exit(128)  # as a container that cannot be started


def _become(root: Path, container: Mapping[str, Any]) -> None:
    """Become the command. Returns only by an OSError."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _mount("proc", root / "proc", "proc")
    os.chroot(root)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    folder = Path(container["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    keep = {*_CAPABILITIES.values(), *(({**_CAPABILITIES, **_MORE_CAPABILITIES})[name] for name in container["add"])}
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in keep:
            _libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)  # fails for numbers that this kernel does not have
    if container["no_new_privileges"]:
        _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.setgroups(container["groups"])
    os.setgid(container["gid"])
    os.setuid(container["uid"])
    _end_with_parent()  # a change of the user clears it
    try:
        os.execvpe(container["command"][0], container["command"], container["env"])
    except FileNotFoundError:
        raise FileNotFoundError(2, f"there is no command '{container['command'][0]}' in the image stand-in") from None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(0, f"ip {' '.join(words)}: {done.stderr.strip()}")


def _run_pod(pod: Mapping[str, Any], status: int) -> int:
    """Answer that there is a network namespace, wait for its link to the hub, and run the containers in their order."""
    _call("unshare", _NEW_FILES | _NEW_NETWORK | _NEW_HOSTNAME | _NEW_IPC)
    _mount("none", Path("/"), flags=_PRIVATE | _RECURSIVE)
    name = str(pod["hostname"]).encode()
    _call("sethostname", name, len(name))
    for folder, size in pod["memory_volumes"].items():  # shared by the containers of the pod
        _mount("tmpfs", Path(folder), "tmpfs", data=f"mode=1777,size={size}")
    os.write(status, b"ready\n")
    if sys.stdin.readline() != "go\n":
        return 128
    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{pod['address']}/24", "dev", "eth0")
    _ip("link", "set", "eth0", "up")
    for container in pod["containers"]:
        if code := _run_container(pod, container):
            return code
    return 0


def _run_hub(status: int) -> int:
    """The switch between the pods. Each line of standard input is the process of a pod and the number of its port."""
    _call("unshare", _NEW_FILES | _NEW_NETWORK)
    _mount("none", Path("/"), flags=_PRIVATE | _RECURSIVE)
    _mount("tmpfs", Path("/mnt"), "tmpfs")  # pods will; try it before any is started
    _ip("link", "add", "bridge", "type", "bridge")
    _ip("link", "set", "bridge", "up")
    os.write(status, b"ready\n")
    for line in sys.stdin:
        pid, port = line.split()
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", port, "master", "bridge")
        _ip("link", "set", port, "up")
        os.write(status, b"linked\n")
    return 0


def main() -> int:
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    _end_with_parent()
    asked = json.loads(sys.stdin.readline())
    try:
        return _run_pod(asked, status) if asked else _run_hub(status)
    except OSError as error:
        os.write(status, f"{error.strerror or error}\n".encode())
        return 128


if __name__ == "__main__":
    sys.exit(main())
