"""Launchers, and others, at a master's port: real sockets on loopback."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from shardtune.errors import UserInputError
from shardtune.launch import handshake, server
from shardtune.launch.control_connection import MasterConnection, MasterLostError, NodeConnection
from shardtune.launch.network import Network
from shardtune.launch.process_role import Node

NETWORK = Network(b"key", "127.0.0.1")
WRONG = Network(b"another key", "127.0.0.1")
SECONDS = 60.0  # that nothing here should take


def nothing() -> None:
    pass


def silent(text: str) -> None:
    pass


def join(
    port: int, network: Network = NETWORK, seconds: float = SECONDS, say: Callable[[str], None] = silent,
    idle: Callable[[], None] = nothing,
) -> NodeConnection:  # fmt: skip
    return NodeConnection.join(Node(2, 1, "127.0.0.1", port), network, seconds, say, idle)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def master(said: list[str]) -> Iterator[MasterConnection]:
    with closing(MasterConnection(Node(2), NETWORK, said.append)) as made:
        yield made


def listening_addresses(port: int) -> set[str]:
    """In the kernel's words: 0100007F is 127.0.0.1."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


def test_a_port_that_is_taken_is_told_before_anything_waits() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserInputError) as caught:
            MasterConnection(Node(2, 0, "10.0.0.1", port), Network(b"key", ""), silent)
    assert f"cannot listen on port {port}" in caught.value.what and "--master-port" in caught.value.fix


def test_the_ranks_store_is_on_loopback_alone_whatever_the_master_listens_on() -> None:
    with closing(MasterConnection(Node(2, 0, "10.0.0.1", 0), Network(b"key", ""), silent)) as several:
        assert listening_addresses(several.store_port) == {"0100007F"}
        assert listening_addresses(several.port) in ({"0" * 32}, {"0" * 8})
    with closing(MasterConnection(Node(), NETWORK, silent)) as alone:
        assert alone.port == alone.store_port and listening_addresses(alone.port) == {"0100007F"}
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shardtune-")]


def test_a_node_shares_the_masters_table(master: MasterConnection) -> None:
    with closing(join(master.port)) as node:
        assert node.call(lambda table: table.get("a"), 10, nothing) is None
        node.call(lambda table: table.set("a", "ü" * 100_000), 10, nothing)
        assert master.table.get("a") == "ü" * 100_000
        assert node.call(lambda table: table.add("seat", "mine"), 10, nothing) == "mine"
        assert master.table.add("seat", "another's") == "mine"


def test_ranks_of_another_node_reach_their_store_through_their_launcher(master: MasterConnection) -> None:
    from torch._C._distributed_c10d import TCPStore

    with closing(join(master.port)) as node:
        limit = timedelta(seconds=SECONDS)
        here = TCPStore("127.0.0.1", master.store_port, None, False, limit)
        there = TCPStore("127.0.0.1", node.store_port, None, False, limit)
        here.set("key", "value")
        assert node.store_port != master.store_port and there.get("key") == b"value"


def test_nothing_of_a_link_is_left_after_close(master: MasterConnection) -> None:
    from torch._C._distributed_c10d import TCPStore

    node = join(master.port)
    rank = TCPStore("127.0.0.1", node.store_port, None, False, timedelta(seconds=SECONDS))
    node.close()
    with pytest.raises(RuntimeError):
        rank.check(["key"])
    master.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shardtune-")]
    for port in (node.store_port, master.port, master.store_port):
        assert not listening_addresses(port)


def test_a_node_with_another_secret_is_refused_and_the_right_one_let_in(
    master: MasterConnection, said: list[str]
) -> None:
    for _ in range(3):
        with pytest.raises(UserInputError) as caught:
            join(master.port, WRONG)
        assert "SHARDTUNE_SECRET on this node differs from that of the master" in caught.value.what
    with closing(join(master.port)):
        pass
    deadline = time.monotonic() + SECONDS
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    (line,) = said
    assert "refused a connection from 127.0.0.1" in line and "does not know the shared secret" in line


def test_a_recorded_handshake_opens_nothing(master: MasterConnection) -> None:
    hello = handshake.hello(handshake.KEY_VALUE)
    with socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS) as first:
        first.sendall(hello)
        proof = handshake.check_reply(NETWORK.key, hello, receive(first, handshake.REPLY_SIZE), "")
        first.sendall(proof)
        assert receive(first, 1) == handshake.ACCEPTED
    with socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS) as again:
        again.sendall(hello)
        assert len(receive(again, handshake.REPLY_SIZE)) == handshake.REPLY_SIZE
        again.sendall(proof + server.frame({"op": "set", "key": "a", "value": "b"}))
        assert receive(again, 1) == b""
    assert master.table.get("a") is None


def test_a_listener_that_sends_the_hello_back_is_no_master() -> None:
    """A proof is for one direction: whoever answers with what it is told proves nothing."""
    with pytest.raises(UserInputError), answered_with(lambda connection: connection.sendall(echo(connection))) as port:
        join(port, seconds=1)


def echo(connection: socket.socket) -> bytes:
    hello = receive(connection, handshake.HELLO_SIZE)
    return hello[:22] + hello[-32:] + bytes(32)


@pytest.mark.parametrize("at_a_time", [100, 4096], ids=["more than handshakes at a time", "fewer"])
def test_200_mute_strangers_do_not_keep_a_node_out(master: MasterConnection, at_a_time: int) -> None:
    assert master._server is not None
    master._server.most_half_open = at_a_time
    mute = [socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS) for _ in range(200)]
    try:
        with closing(join(master.port)) as node:
            node.call(lambda table: table.set("a", "b"), SECONDS, nothing)
        assert master.table.get("a") == "b"
        mute[0].settimeout(SECONDS)
        assert mute[0].recv(100) == b"", "a stranger is told nothing, and closed"
    finally:
        for connection in mute:
            connection.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 100, b"\x00" * 1000, os.urandom(1000)])
def test_a_stranger_that_talks_gets_a_close_and_no_byte(master: MasterConnection, said: list[str], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS) as stranger:
        stranger.sendall(sent)
        assert receive(stranger, 1) == b""
    assert len(said) == 1 and "does not speak shardtune's protocol" in said[0]


def test_another_version_is_told_so_on_both_sides(
    master: MasterConnection, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    future = handshake.hello(handshake.KEY_VALUE).replace(b"launcher 01", b"launcher 02")
    with socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS) as node:
        node.sendall(future)
        reply = receive(node, handshake.REPLY_SIZE)
    assert len(said) == 1 and "it runs another version of shardtune" in said[0]
    monkeypatch.setattr(handshake, "_HEAD", future[: len(reply)])
    with pytest.raises(UserInputError) as caught:
        handshake.check_reply(NETWORK.key, future, reply, "host:1")
    assert "The master host:1 runs another version of shardtune" in caught.value.what


def test_a_probe_of_the_port_is_not_worth_a_word(master: MasterConnection, said: list[str]) -> None:
    socket.create_connection(("127.0.0.1", master.port), timeout=SECONDS).close()
    with closing(join(master.port)):  # served after it
        assert said == []


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    try:
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    except ConnectionResetError:  # a close with something unread
        pass
    return data


@contextmanager
def answered_with(respond: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where every connection is given to `respond` and then closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                respond(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(SECONDS)


def test_a_port_where_nobody_answers_is_told_apart_from_a_master() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(UserInputError) as caught:
        join(mute.getsockname()[1], seconds=1)
    assert "Could not connect to the master" in caught.value.what
    assert "it is not a shardtune master: it accepts connections and sends nothing" in caught.value.why


def test_a_port_that_closes_at_once_is_told_apart_from_a_master() -> None:
    with answered_with(lambda connection: None) as port, pytest.raises(UserInputError) as caught:
        join(port, seconds=1)
    assert "it is not a shardtune master: it closes the connection" in caught.value.why


def test_a_port_that_sends_something_else_is_told_apart_from_a_master() -> None:
    def ssh(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.recv(1000)

    with answered_with(ssh) as port, pytest.raises(UserInputError) as caught:
        join(port, seconds=1)
    assert "it is not a shardtune master" in caught.value.why


def test_a_web_server_on_the_port_is_told_apart_from_a_master() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(UserInputError) as caught:
            join(web.server_address[1], seconds=1)
        web.shutdown()
    assert "it is not a shardtune master" in caught.value.why


def test_what_is_seen_is_said_while_waiting(said: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(UserInputError):
        join(mute.getsockname()[1], seconds=4, say=said.append)
    assert len(said) == 1 and "since 3 s: Something is listening on 127.0.0.1" in said[0]


class Signal(Exception):
    pass


def test_a_signal_ends_the_wait_for_a_mute_listener() -> None:
    began = time.monotonic()

    def asked_to_stop() -> None:
        if time.monotonic() - began > 1:
            raise Signal

    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(Signal):
        join(mute.getsockname()[1], idle=asked_to_stop)
    assert time.monotonic() - began < SECONDS / 2


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "nothing is listening on port"),
        ("no-such-host.invalid", "does not resolve"),
        ("255.255.255.255", "denied|unreachable"),  # refused by the own kernel, at once
    ],
)
def test_a_master_that_cannot_be_reached_is_told_with_the_reason(host: str, words: str) -> None:
    with pytest.raises(UserInputError) as caught:
        NodeConnection.join(Node(2, 1, host, free_port()), NETWORK, 0.5, silent, nothing)
    assert re.search(words, caught.value.why) and "Could not connect to the master" in caught.value.what


def test_a_master_that_comes_after_something_else_had_the_port_is_waited_for(said: list[str]) -> None:
    """The other listener closes some handshakes half way: as a master does that is lost in the middle of one."""
    made: list[MasterConnection] = []
    half = handshake.answer(NETWORK.key, handshake.hello(handshake.KEY_VALUE))[0][:40]

    def come() -> None:
        with answered_with(lambda connection: connection.sendall(half)) as port:
            ports.append(port)
            time.sleep(1)
        made.append(MasterConnection(Node(2, 0, "127.0.0.1", port), NETWORK, silent))

    ports: list[int] = []
    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    while not ports:
        time.sleep(0.01)
    with closing(join(ports[0])) as node:
        thread.join(SECONDS)
        assert node.call(lambda table: table.add("a", "b"), SECONDS, nothing) == "b"
    made[0].close()


STOPPED_MASTER = """
import os, signal, sys
from shardtune.launch.control_connection import MasterConnection
from shardtune.launch.network import Network
from shardtune.launch.process_role import Node
link = MasterConnection(Node(2), Network(b"key", "127.0.0.1"), print)
print(link.port, flush=True)
sys.stdin.readline()
"""


def test_a_master_that_does_not_answer_holds_neither_call_nor_close() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", STOPPED_MASTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        node = join(int(other.stdout.readline()))
        os.kill(other.pid, signal.SIGSTOP)
        while any("\tT" not in file.read_text() for file in Path(f"/proc/{other.pid}/task").glob("*/status")):
            time.sleep(0.01)  # a thread on another core goes on for a moment
        with pytest.raises(MasterLostError) as caught:
            node.call(lambda table: table.set("a", "b"), 0.5, nothing)
        assert "has not answered for" in caught.value.why and node.silent_for() > 0.4
        node.post(lambda table: table.set("a", "b"))
        node.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shardtune-")]
    finally:
        other.kill()
        other.communicate()


def test_a_broken_connection_is_told_at_once() -> None:
    master = MasterConnection(Node(2), NETWORK, silent)
    with closing(join(master.port)) as node:
        master.close()
        with pytest.raises(MasterLostError) as caught:
            node.call(lambda table: table.get("a"), SECONDS, nothing)
        assert "The connection broke: " in caught.value.why and node.silent_for() == float("inf")
