"""A cluster on a loopback port, and the jobs that tests put on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer

from shardtune.cluster.api import Cluster, connect


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
def kube(server: ApiServer, tmp_path: Path, shardtune: Callable[..., Any]) -> Callable[..., Any]:
    """The command line with a kubeconfig that leads to the server."""
    file = server.kubeconfig(tmp_path)

    def run(*args: object, env: dict[str, str] | None = None, **options: Any) -> Any:
        return shardtune(*args, env={"KUBECONFIG": str(file), **(env or {})}, **options)

    return run
