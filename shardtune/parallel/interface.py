"""Over which network interface do the ranks talk? The one that leads to the master, so that nobody has to name it."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import MutableMapping

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME from the route to MASTER_ADDR, unless it is set or unknown.

    gloo would resolve this machine's own name instead, which in a container or namespace is often missing or loopback.
    NCCL finds its interfaces well by itself and is left alone.
    """
    if "GLOO_SOCKET_IFNAME" in environ or "MASTER_ADDR" not in environ:
        return
    name = interface_to(environ["MASTER_ADDR"])
    if name is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def interface_to(host: str) -> str | None:
    """The interface packets to `host` leave by; None where that is unknown (IPv6, no route)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: a datagram socket only looks up its route
        except OSError:
            return None
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
