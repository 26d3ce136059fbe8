from __future__ import annotations

import pytest

from shardtune.errors import UserInputError
from shardtune.launch.network import Network, read_network
from shardtune.launch.process_role import Node

SECRET = {"SHARDTUNE_SECRET": "0123456789abcdef"}
REMOTE = Node(2, 0, "10.0.0.1", 29500)


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_on_a_network_need_a_secret_and_are_told_how_to_make_one(rank: int) -> None:
    with pytest.raises(UserInputError) as caught:
        read_network({}, Node(2, rank, "10.0.0.1", 29500))
    assert "SHARDTUNE_SECRET is not set" in caught.value.what
    assert "openssl rand -hex 32" in caught.value.fix and "--insecure-network" in caught.value.fix


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(UserInputError) as caught:
        read_network({"SHARDTUNE_SECRET": "hunter2hunter2\n"}, REMOTE)
    assert "has 14 characters; at least 16" in caught.value.what and "hunter2" not in str(caught.value)


def test_a_network_without_a_secret_can_be_asked_for() -> None:
    assert read_network({"SHARDTUNE_INSECURE_NETWORK": "1"}, REMOTE).insecure
    assert not read_network({"SHARDTUNE_INSECURE_NETWORK": "1", **SECRET}, REMOTE).insecure
    with pytest.raises(UserInputError):
        read_network({"SHARDTUNE_INSECURE_NETWORK": "0"}, REMOTE)


@pytest.mark.parametrize(
    ("address", "bind"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("127.0.0.9", "127.0.0.9")],
)
def test_nodes_on_one_machine_need_no_secret_and_listen_on_loopback_alone(address: str, bind: str) -> None:
    assert read_network({}, Node(2, 0, address, 1)).bind == bind


def test_a_host_name_is_never_taken_for_this_machine() -> None:
    """Debian maps a machine's own name to 127.0.1.1, and only there."""
    assert read_network(SECRET, Node(2, 0, "some-host", 1)).bind == ""


def test_one_node_needs_nothing() -> None:
    assert read_network({}, Node()) == Network(b"", "127.0.0.1")


def test_the_secret_and_its_key_are_not_in_what_is_printed() -> None:
    network = read_network(SECRET, REMOTE)
    assert "0123456789abcdef" not in repr(network) and repr(network.key) not in repr(network)
    assert network.key == read_network({"SHARDTUNE_SECRET": "0123456789abcdef\n"}, REMOTE).key
    assert network.key != read_network({"SHARDTUNE_SECRET": "0123456789abcdeF"}, REMOTE).key
