"""The dashboard as a server: what it answers, to whom, and how it ends."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from fake_run import FakeRun
from running import Command
from serving import Dashboard, dashboard

from shardtune.report.access import AccessMiddleware, _name, is_loopback


def begun(folder: Path) -> FakeRun:
    run = FakeRun(folder, ranks=2)
    run.begin(50)
    for step in range(1, 4):
        run.step(step, 50)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "secret.txt").write_text("not yours")
    FakeRun(root / "outside", ranks=1).begin(5)
    begun(root / "runs" / "one")
    begun(root / "runs" / "two")
    return root / "runs"


@pytest.fixture(scope="module")
def served(shared_environment: dict[str, str], runs: Path) -> Iterator[Dashboard]:
    with dashboard(shared_environment, runs) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(shared_environment: dict[str, str], runs: Path) -> Iterator[Dashboard]:
    with dashboard(shared_environment, runs, "--host", "0.0.0.0") as found:
        yield found


def test_it_lists_runs_and_answers_only_what_is_new(served: Dashboard, runs: Path) -> None:
    first = served.json("/api/runs")
    assert {run["name"] for run in first["runs"]} == {"one", "two"}
    assert served.json(f"/api/runs?cursor={first['cursor']}") == {"cursor": first["cursor"], "unchanged": True}
    view = served.json("/api/runs/one")
    assert view["kind"] == "run" and served.json(f"/api/runs/one?cursor={view['cursor']}").get("unchanged")
    run = FakeRun(runs / "one", ranks=2)
    run.step(9, 50)
    run.raw('{"v": 2, "half')
    later = served.json(f"/api/runs/one?cursor={view['cursor']}")
    assert later["cursor"] != view["cursor"] and later["tiles"][0]["value"] == "9"
    run.raw('-written": 1, "event": "x"}\n')


def test_runs_are_compared(served: Dashboard) -> None:
    assert served.json("/api/compare?run=one&run=two")["runs"] == ["one", "two"]
    assert served.json("/api/compare?run=one&run=gone") == {"gone": True}
    assert served.json("/api/compare") == {"gone": True}


def test_a_run_that_is_deleted_is_gone_and_the_rest_goes_on(served: Dashboard, runs: Path) -> None:
    begun(runs / "three")
    assert served.json("/api/runs/three")["kind"] == "run"
    shutil.rmtree(runs / "three")
    assert served.json("/api/runs/three") == {"gone": True}
    assert "three" not in {run["name"] for run in served.json("/api/runs")["runs"]}


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..", "/api/runs/../outside", "/api/runs/%2e%2e%2foutside", "/api/runs/..%2foutside", "/static/../page.py",
        "/static/%2e%2e/page.py", "/api/runs/one/../../outside", "/api/runs//etc", "/api/compare?run=../outside&run=..",
        "/runs/../../secret.txt", "/static/%2fetc%2fpasswd", "/api/runs/one%00",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder_of_runs(served: Dashboard, path: str) -> None:
    status, _, text = served.ask(path)
    assert status in (400, 404) or json.loads(text) == {"gone": True}
    assert "outside" not in text and "not yours" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(served: Dashboard, method: str) -> None:
    assert served.ask("/api/runs", method)[0] == served.ask("/nothing", method)[0] == 405


def test_every_answer_forbids_foreign_scripts_and_frames(served: Dashboard) -> None:
    for path in ("/", "/runs/one", "/api/runs", "/static/charts.js", "/nothing"):
        _, headers, _ = served.ask(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and "server" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil", "[::2]"]
)
def test_on_this_machine_only_its_own_names_are_answered(served: Dashboard, host: str) -> None:
    assert served.ask("/api/runs", Host=host)[0] in (400, 421)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:99"])
def test_names_of_this_machine_are_answered(served: Dashboard, host: str) -> None:
    assert served.ask("/api/runs", Host=host)[0] == 200


def test_others_need_the_token_which_is_made_and_leaves_the_address(guarded: Dashboard) -> None:
    token = parse_qs(urlsplit(guarded.url).query)["token"][0]
    assert len(token) >= 24
    assert guarded.ask("/api/runs")[0] == 401
    assert guarded.ask("/static/charts.js")[0] == 401
    assert guarded.ask("/?token=wrong")[0] == 401
    assert guarded.ask("/api/runs", Authorization=f"Bearer {token}x")[0] == 401
    assert guarded.ask("/api/runs", Cookie=f"shardtune-token-{urlsplit(guarded.url).port}={token[:-1]}")[0] == 401
    assert guarded.ask("/api/runs", Authorization=f"Bearer {token}")[0] == 200
    status, headers, _ = guarded.ask(f"//evil.example/runs/one?x=1&token={token}", Host="gpu-node:80")
    assert status == 303 and headers["location"] == "/evil.example/runs/one?x=1", "and leads nowhere else"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert guarded.ask("/api/runs", Cookie=cookie.partition(";")[0], Host="gpu-node:80")[0] == 200


def test_ctrl_c_ends_it_cleanly_and_no_token_is_in_its_log(environment: dict[str, str], runs: Path) -> None:
    with dashboard(environment, runs, "--token", "correct-horse") as found:
        assert found.ask("/?token=correct-horse")[0] == 303
        assert found.ask("/api/runs")[0] == 401
        code, out, err = found.end()
    assert code == 0 and "Dashboard stopped." in out
    assert "Traceback" not in err and "correct-horse" not in out + err


def test_a_port_in_use_is_told(shardtune: Command, runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = shardtune("dashboard", runs, "--port", port)
    assert result.returncode == 2 and f"port {port}" in result.stderr and "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_that_is_not_there_and_a_short_token_are_told(shardtune: Command, runs: Path) -> None:
    result = shardtune("dashboard", runs / "nowhere")
    assert result.returncode == 2 and "no folder" in result.stderr
    result = shardtune("dashboard", runs, "--token", "abc", "--port", "0")
    assert result.returncode == 2 and "--token" in result.stderr


def test_an_open_door_without_a_token_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="token"):
        AccessMiddleware(lambda *_: None, names=(), token=None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False), ("gpu-node", False)],
)  # fmt: skip
def test_what_counts_as_this_machine(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


def test_names_are_read_from_host_headers() -> None:
    assert [_name(host) for host in ("a:1", "[::1]:8", "A", "")] == ["a", "::1", "a", ""]
