"""A cluster on a loopback port, and the command line that talks to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from api_server import ApiServer

from shardtune.cluster.api import Cluster, connect

Kube = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    root = tmp_path / "container"
    root.mkdir()
    with ApiServer(root) as running:
        yield running


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    return connect()


@pytest.fixture
def kube(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Kube:
    """The command line with a kubeconfig that leads to the server, in this process: there are many such tests."""
    from shardtune.cli.main import main

    file = server.kubeconfig(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: object, env: dict[str, str] | None = None) -> CompletedProcess[str]:
        for name, value in {"KUBECONFIG": str(file), **(env or {})}.items():
            monkeypatch.setenv(name, value)
        words = [*map(str, args)]
        monkeypatch.setattr("sys.argv", ["shardtune", *words])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return CompletedProcess(words, int(str(code or 0)), out, err)

    return run
