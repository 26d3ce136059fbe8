"""A cluster for a test: in namespaces where this machine allows them, else (and for the loopback variant) on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.cluster import Cluster, environment_of_tests, why_no_namespaces


@pytest.fixture(scope="session")
def no_namespaces() -> str | None:
    return why_no_namespaces()


@pytest.fixture
def networked(no_namespaces: str | None) -> Iterator[Cluster]:
    """Three nodes, each with a network of its own."""
    if no_namespaces is not None:
        pytest.skip(f"three nodes need network namespaces, but {no_namespaces}")
    with Cluster(3, namespaces=True) as cluster:
        cluster.environment = environment_of_tests()
        yield cluster


@pytest.fixture
def loopback() -> Iterator[Cluster]:
    """Three nodes that share this machine's loopback: all but cutting the network can be tried everywhere."""
    with Cluster(3, namespaces=False) as cluster:
        cluster.environment = environment_of_tests()
        yield cluster
