"""What a run's profile events count under each way of sharding is what the plan says, and what docs/parallel.md shows."""

from __future__ import annotations

import pytest
from running import REPOSITORY
from traffic_runs import BEGIN, END, REPLICAS, Profile, leaves_node, measure, planned, table

pytestmark = pytest.mark.slow  # tests/observe/test_traffic_counter.py counts the same without runs
Measured = dict[str, list[Profile]]


@pytest.fixture(scope="module")
def measured(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure(shared_environment, tmp_path_factory.mktemp("traffic"))


@pytest.mark.parametrize("setting", REPLICAS)
def test_every_process_sends_what_the_plan_says(measured: Measured, setting: str) -> None:
    plan = planned(setting)
    for profile in measured[setting]:
        sent = profile["collectives"]
        assert (sent["shard"], sent["replicate"]) == (plan.shard, plan.replicate)
        assert 0 < sent["other"] < 2048
    assert leaves_node(measured[setting], 0) == leaves_node(measured[setting], 1) == plan.between_nodes


def test_replicated_bases_are_never_sent(measured: Measured) -> None:
    """What trains has 896 parameters: gathered once and reduced once per step, in float32, 3/4 of it by each of four."""
    assert all(profile["collectives"]["shard"] == 896 * (4 + 4) * 3 // 4 for profile in measured["replicate"])
    assert all(profile["collectives"]["replicate"] == 0 for profile in measured["replicate"])


def test_between_the_nodes_of_a_hybrid_run_go_only_the_adapters_gradients(measured: Measured) -> None:
    """Each of a node's two processes all-reduces its half of 896 float32 gradients with one process of the other node."""
    for profile in measured["hybrid"]:
        between = profile["collectives_between_nodes"]
        assert (between["shard"], between["replicate"]) == (0, 896 * 4 // 2)


def test_the_measured_table_in_the_docs_is_up_to_date(measured: Measured) -> None:
    page = (REPOSITORY / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table(measured)}\n{END}" in page, "python tests/train/traffic_runs.py docs/parallel.md renews it"
