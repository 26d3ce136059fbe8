"""What a pod makes of the variables that each scheduler gives it, and of a job that says how many nodes it has."""

from __future__ import annotations

import pytest

from shardtune.errors import UserInputError
from shardtune.launch.process_role import (
    Node,
    NodeOptions,
    Worker,
    detect_role,
    refuse_lone_pod,
    says_how_many_nodes,
    this_node_alone,
    unused_master,
)

THREE = {"SHARDTUNE_NODES": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
# As the controllers give them to the second pod of three.
PYTORCHJOB = {
    **THREE, "MASTER_ADDR": "ft-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "24", "RANK": "1",
    "PET_MASTER_ADDR": "ft-master-0", "PET_MASTER_PORT": "23456", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8",
    "PET_NNODES": "3",
}  # fmt: skip
TRAINJOB = {
    **THREE, "PET_NNODES": "3", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1",
    "PET_MASTER_ADDR": "ft-node-0-0.ft", "PET_MASTER_PORT": "29500",
}  # fmt: skip
INDEXED_JOB = {**THREE, "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "ft-0.ft", "MASTER_PORT": "29500"}
SLURM = {
    "SHARDTUNE_NODES": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-05]",
}  # fmt: skip
ALONE = {**THREE, "JOB_COMPLETION_INDEX": "1"}  # a TrainJob whose runtime has no mlPolicy.torch


def without(environ: dict[str, str], prefix: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(prefix)}


def refusal(environ: dict[str, str], options: NodeOptions | None = None) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        detect_role(environ, options or NodeOptions())
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        pytest.param(PYTORCHJOB, Node(3, 1, "ft-master-0", 23456, 8), id="PyTorchJob"),
        pytest.param(without(PYTORCHJOB, "PET_"), Node(3, 1, "ft-master-0", 23456), id="PyTorchJob without PET_*"),
        pytest.param(
            {**without(PYTORCHJOB, "PET_"), "WORLD_SIZE": "3"}, Node(3, 1, "ft-master-0", 23456), id="nproc auto"
        ),
        pytest.param(TRAINJOB, Node(3, 1, "ft-node-0-0.ft", 29500, 8), id="TrainJob"),
        pytest.param(INDEXED_JOB, Node(3, 1, "ft-0.ft", 29500), id="Job or JobSet"),
        pytest.param(SLURM, Node(3, 1, "gpu03", 29500), id="Slurm"),
        pytest.param({"SHARDTUNE_NODES": "1"}, Node(), id="one container"),
        pytest.param(
            {"SHARDTUNE_NODES": "1", "RANK": "0", "WORLD_SIZE": "8", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
            Node(nproc=8),
            id="PyTorchJob with one pod of eight processes",
        ),
    ],
)
def test_every_kind_of_job_tells_a_pod_which_node_it_is(environ: dict[str, str], node: Node) -> None:
    assert detect_role(environ) == node
    assert says_how_many_nodes(environ, NodeOptions()) and unused_master(environ, NodeOptions()) is None


def test_a_pod_of_a_trainjob_that_was_given_no_rendezvous_does_not_train_alone() -> None:
    refused = refusal(ALONE)
    assert refused.what == "The job was submitted with 3 nodes, but nothing tells this one where the master is."
    assert "JOB_COMPLETION_INDEX=1" in refused.why and "train alone" in refused.why
    assert "mlPolicy.torch" in refused.fix and "spec.trainer" in refused.fix


def test_a_pod_that_was_given_nothing_at_all_says_so() -> None:
    refused = refusal(THREE)
    assert "which one or where the master is" in refused.what


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        ({**TRAINJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, "PET_NNODES is 1"),
        ({**PYTORCHJOB, "PET_NNODES": "4"}, "PET_NNODES is 4"),
        ({**without(PYTORCHJOB, "PET_"), "WORLD_SIZE": "1", "RANK": "0"}, "WORLD_SIZE is 1"),
        ({**without(PYTORCHJOB, "PET_"), "WORLD_SIZE": "8"}, "WORLD_SIZE is 8"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_NODES is 2"),
    ],
)
def test_a_scheduler_that_counts_other_nodes_than_were_submitted_is_refused(
    environ: dict[str, str], other: str
) -> None:
    refused = refusal(environ)
    assert refused.what == f"The job was submitted with 3 nodes (SHARDTUNE_NODES), but {other}."
    assert "The scheduler set " in refused.why and "cluster.nodes" in refused.fix


def test_one_node_that_became_three_is_refused_too() -> None:
    assert "with 1 node (SHARDTUNE_NODES), but PET_NNODES is 3" in refusal({**TRAINJOB, "SHARDTUNE_NODES": "1"}).what


def test_what_is_shown_of_the_environment_holds_no_secret() -> None:
    assert "hunter2" not in str(vars(refusal({**ALONE, "SHARDTUNE_SECRET": "hunter2", "HF_TOKEN": "hunter2"})))


@pytest.mark.parametrize("text", ["0", "-1"])
def test_no_nodes_at_all_are_refused(text: str) -> None:
    assert f"SHARDTUNE_NODES is {text}" in refusal({"SHARDTUNE_NODES": text}).what


def test_a_node_beyond_the_number_of_nodes_is_refused() -> None:
    assert (
        "JOB_COMPLETION_INDEX is 3, but SHARDTUNE_NODES is 3"
        in refusal({**INDEXED_JOB, "JOB_COMPLETION_INDEX": "3"}).what
    )


WORKER = {"RANK": "0", "WORLD_SIZE": "24", "LOCAL_RANK": "0", "MASTER_ADDR": "m", "MASTER_PORT": "1"}


def test_torchrun_in_a_pod_is_believed_when_it_has_started_all_nodes() -> None:
    assert detect_role({**TRAINJOB, **WORKER, "GROUP_WORLD_SIZE": "3"}) == Worker(0, 24, 0)
    assert detect_role({**TRAINJOB, **WORKER}) == Worker(0, 24, 0)  # our own launcher


@pytest.mark.parametrize("launched", [{"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, {"WORLD_SIZE": "1"}])
def test_torchrun_that_started_a_world_of_its_own_is_refused(launched: dict[str, str]) -> None:
    assert "but its launcher started" in refusal({**THREE, **WORKER, **launched}).what


def test_the_command_line_may_repeat_the_number_of_nodes_but_not_change_it() -> None:
    assert detect_role(INDEXED_JOB, NodeOptions(nnodes=3)) == Node(3, 1, "ft-0.ft", 29500)
    refused = refusal(INDEXED_JOB, NodeOptions(nnodes=1))
    assert "--nnodes is 1, but the job was submitted with 3 nodes" in refused.what
    assert "unset SHARDTUNE_NODES" in refused.fix


def test_a_pod_whose_config_asks_for_more_nodes_than_it_was_given_does_not_train_alone() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    with pytest.raises(UserInputError) as caught:
        refuse_lone_pod(Node(), 3, pod, NodeOptions())
    assert "asks for 3 nodes (cluster.nodes), but this pod was given one" in caught.value.what
    assert "JOB_COMPLETION_INDEX=2" in caught.value.why and "--nnodes 1" in caught.value.fix


@pytest.mark.parametrize(
    ("node", "nodes", "environ", "options"),
    [
        pytest.param(Node(), 3, {}, NodeOptions(), id="not a pod: a laptop that tries the config"),
        pytest.param(Node(), 1, THREE, NodeOptions(), id="one node asked for"),
        pytest.param(Node(3, 1, "m", 1), 3, THREE, NodeOptions(), id="three given"),
        pytest.param(Node(), 3, THREE, NodeOptions(nnodes=1), id="one on the command line"),
    ],
)
def test_elsewhere_the_number_of_nodes_in_the_config_changes_nothing(
    node: Node, nodes: int, environ: dict[str, str], options: NodeOptions
) -> None:
    refuse_lone_pod(node, nodes, environ, options)  # raises otherwise


def test_an_init_container_examines_its_own_node_as_one_of_the_jobs() -> None:
    assert this_node_alone(ALONE, 1) == Node(nnodes=3, master_addr="")
    assert this_node_alone({"PET_NPROC_PER_NODE": "8"}, 2) == Node(nnodes=2, master_addr="", nproc=8)
