from __future__ import annotations

from shardtune.parallel.interface import choose_interface, interface_to


def test_the_interface_to_loopback_is_lo() -> None:
    assert interface_to("127.0.0.1") == "lo"


def test_a_name_that_does_not_resolve_has_none() -> None:
    assert interface_to("no-such-host.invalid") is None


def test_what_the_user_has_set_stays() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    del environ["GLOO_SOCKET_IFNAME"]
    choose_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
