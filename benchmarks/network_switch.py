"""How are nodes' links limited where the kernel cannot? Every packet passes through a process that makes it wait.

`SwitchedCluster` gives each node a TUN device instead of a cable to a bridge. This file, run as a program in the hub's
namespace, holds their other ends and passes packets on, each when its sender's and its receiver's link are free.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from faults.cluster import Cluster  # noqa: E402

MTU = 9000  # larger packets are fewer: each costs this process some ten microseconds
QUEUE = 64  # packets that wait at a node; more would delay the launchers' heartbeats by seconds on a slow link
CATCH_UP = 1e-3  # seconds of the link's time that are not lost when a sleep took longer than asked for
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


class SwitchedCluster(Cluster):
    """Nodes whose links this program limits; their network cannot be cut."""

    _switch: subprocess.Popen[str] | None = None

    def _wire(self) -> None:
        _ip("netns", "add", str(self.hub))
        command = ["ip", "netns", "exec", str(self.hub), sys.executable, __file__, str(len(self.machines))]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("no TUN devices can be made here (see above)")
        for machine in self.machines:
            name = str(machine.namespace)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", str(self.hub), "link", "set", f"p{machine.number}", "netns", name, "name", "net0")
            _ip("-n", name, "link", "set", "net0", "mtu", str(MTU), "txqueuelen", str(QUEUE))
            _ip("-n", name, "addr", "add", f"10.77.0.{machine.number + 1}/24", "dev", "net0")
            _ip("-n", name, "link", "set", "net0", "up")

    def limit(self, bits_per_second: float | None) -> None:
        assert self._switch is not None and self._switch.stdin is not None
        self._switch.stdin.write(f"{bits_per_second or 'inf'}\n")
        self._switch.stdin.flush()

    def _remove(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        super()._remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Switch:
    """Packets from each node's TUN device to the one they are addressed to."""

    def __init__(self, tuns: list[int]) -> None:
        self.tuns = tuns
        self.bytes_per_second = float("inf")
        self._sending_until, self._receiving_until = [0.0] * len(tuns), [0.0] * len(tuns)
        self._lock = threading.Lock()

    def forward(self, source: int) -> None:
        while packet := os.read(self.tuns[source], 1 << 16):
            target = packet[19] - 1  # of 10.77.0.1 and so on; the kernel's own IPv6 packets lead nowhere
            if packet[0] >> 4 != 4 or not 0 <= target < len(self.tuns):
                continue
            delay = self._arrival(source, target, len(packet)) - time.monotonic()
            if delay > 0:
                time.sleep(delay)
            os.write(self.tuns[target], packet)

    def _arrival(self, source: int, target: int, size: int) -> float:
        with self._lock:
            free = max(time.monotonic() - CATCH_UP, self._sending_until[source], self._receiving_until[target])
            self._sending_until[source] = self._receiving_until[target] = free + size / self.bytes_per_second
            return self._sending_until[source]


def open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def main() -> None:
    switch = Switch([open_tun(f"p{node}") for node in range(int(sys.argv[1]))])
    for node in range(len(switch.tuns)):
        threading.Thread(target=switch.forward, args=(node,), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:  # a new limit, in bits per second; the end of it is the end of the cluster
        switch.bytes_per_second = float(line) / 8


if __name__ == "__main__":
    main()
