from __future__ import annotations

import pytest

from shardtune.errors import UserInputError
from shardtune.launch.process_role import Node, NodeOptions, Worker, detect_role, first_host, unused_master

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def refusal(**environ: str) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        detect_role(environ)
    assert caught.value.exit_code == 2
    return caught.value


def test_an_environment_that_says_nothing_is_one_machine() -> None:
    assert detect_role({"PATH": "/bin"}) == Node()
    assert Node() == Node(nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0, nproc=None)


def test_a_worker_of_torchrun_is_a_worker() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect_role(environ) == Worker(rank=3, world_size=4, local_rank=1)


def test_a_worker_stays_one_inside_a_pod_with_the_variables_of_kubeflow() -> None:
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_NPROC_PER_NODE": "2"}
    worker = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect_role({**pod, **worker}) == Worker(3, 4, 1)


def test_a_pod_of_a_trainjob_starts_its_own_processes() -> None:
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_NPROC_PER_NODE": "4"}
    assert detect_role({**pod, "PET_MASTER_PORT": "1234"}) == Node(2, 1, "job-node-0-0.job", 1234, 4)
    assert detect_role(pod) == Node(2, 1, "job-node-0-0.job", 29500, 4)


def test_the_pod_index_that_pytorchjob_calls_rank_does_not_make_a_launching_pod_a_worker() -> None:
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_NPROC_PER_NODE": "2"}
    assert isinstance(detect_role({**pod, "RANK": "1", "WORLD_SIZE": "4", **MASTER}), Node)


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_a_word_for_the_number_of_processes_means_auto(word: str) -> None:
    assert detect_role({"PET_NPROC_PER_NODE": word}) == Node(nproc="auto")


def test_one_node_needs_no_master_and_takes_any_free_port() -> None:
    assert detect_role({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}) == Node(nproc=2)
    assert detect_role({"PET_NNODES": "2:2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m"}) == Node(2, 0, "m", 29500)


def test_one_process_per_pod_is_a_worker_on_its_first_device() -> None:
    assert detect_role({"RANK": "1", "WORLD_SIZE": "2", **MASTER}) == Worker(1, 2, 0)
    assert detect_role({"RANK": "0", "WORLD_SIZE": "1"}) == Worker(0, 1, 0)


def test_a_world_of_one_in_a_container_image_changes_nothing() -> None:
    assert detect_role({"WORLD_SIZE": "1"}) == Node()


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE"),
        ({"LOCAL_RANK": "0", "RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK and PET_MASTER_ADDR"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_MASTER_ADDR"),
    ],
)
def test_half_a_setting_is_told_with_what_is_missing(environ: dict[str, str], missing: str) -> None:
    problem = refusal(**environ)
    assert problem.what.startswith(f"{missing} {'are' if ' and ' in missing else 'is'} not set, but")
    assert "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in problem.why
    assert "torchrun" in problem.fix


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "one"),
        ("WORLD_SIZE", ""),
        ("LOCAL_RANK", "1.5"),
        ("PET_NNODES", "two"),
        ("PET_NODE_RANK", "x"),
        ("PET_NPROC_PER_NODE", "many"),
        ("PET_MASTER_PORT", "http"),
        ("SLURM_STEP_NUM_NODES", "2(x3)"),
        ("SLURM_STEP_NUM_TASKS", ""),
    ],
)
def test_what_is_no_number_is_told_by_name(name: str, text: str) -> None:
    worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if not name.startswith(("PET", "SLURM")) else {}
    problem = refusal(**{**worker, "PET_NNODES" if name.startswith("PET") else "X": "1", name: text})
    assert f"{name} is '{text}', not an integer" in problem.what


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "WORLD_SIZE": "2", **MASTER},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MASTER},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "m"},
        {"PET_NNODES": "0"},
    ],
)
def test_numbers_that_would_leave_ranks_waiting_for_each_other_are_refused(environ: dict[str, str]) -> None:
    problem = refusal(**environ)
    assert ", but " in problem.what
    assert "must be between 0 and" in problem.why
    assert "unset" in problem.fix


def test_a_node_without_processes_is_refused() -> None:
    assert "PET_NPROC_PER_NODE is 0" in refusal(PET_NPROC_PER_NODE="0").what


def test_a_changing_number_of_nodes_is_refused() -> None:
    problem = refusal(PET_NNODES="1:4")
    assert "PET_NNODES is 1:4" in problem.what
    assert "single number" in problem.fix


def test_the_command_line_says_which_node_this_is() -> None:
    options = NodeOptions(nnodes=3, node_rank=2, master_addr="10.0.0.1", master_port=1234)
    assert detect_role({}, options) == Node(3, 2, "10.0.0.1", 1234)
    assert detect_role({}, NodeOptions(nnodes=3, node_rank=0, master_addr="m")) == Node(3, 0, "m", 29500)


def test_what_the_command_line_leaves_out_comes_from_the_scheduler() -> None:
    environ = {"MASTER_ADDR": "m", "MASTER_PORT": "77", "SLURM_NODEID": "1"}
    assert detect_role(environ, NodeOptions(nnodes=2)) == Node(2, 1, "m", 77)
    assert detect_role(environ, NodeOptions(nnodes=2, node_rank=0, master_port=5)) == Node(2, 0, "m", 5)


def test_the_workers_of_our_own_launcher_do_not_take_their_command_line_for_a_launch() -> None:
    worker = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    assert detect_role(worker, NodeOptions(nnodes=2, node_rank=1, master_addr="m")) == Worker(3, 4, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (NodeOptions(node_rank=1), "need --nnodes"),
        (NodeOptions(nnodes=2, master_addr="m"), "needs --node-rank"),
        (NodeOptions(nnodes=2, node_rank=1), "needs --master-addr"),
        (NodeOptions(nnodes=2, node_rank=2, master_addr="m"), "--node-rank is 2, but --nnodes is 2"),
    ],
)
def test_half_of_what_a_node_needs_is_refused_by_name(options: NodeOptions, words: str) -> None:
    with pytest.raises(UserInputError) as caught:
        detect_role({}, options)
    assert words in caught.value.what


SLURM = {"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[03-05]"}


def test_a_task_of_srun_is_a_node_and_the_first_host_is_the_master() -> None:
    assert detect_role(SLURM) == Node(3, 1, "gpu03", 29500)
    assert detect_role({**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "7"}) == Node(3, 1, "m", 7)


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_several_tasks_of_srun_on_a_node_are_refused_and_told_by_the_first(nodes: str) -> None:
    step = {**SLURM, "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": "24"}
    problem = refusal(**step, SLURM_PROCID="0", SLURM_LOCALID="0")
    assert f"24 tasks on {nodes} node" in problem.what and "--ntasks-per-node=1" in problem.fix
    other = refusal(**step, SLURM_PROCID="5", SLURM_LOCALID="5")
    assert other.what == "Task 5 of 24 does not start; task 0 prints the reason." and not other.why and not other.fix


def test_several_tasks_are_refused_when_nothing_but_their_number_is_known() -> None:
    assert "4 tasks on 1 node." in refusal(SLURM_STEP_NUM_TASKS="4").what


# What SLURM sets beside it in each case; in none of them is this process one of several.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}  # fmt: skip
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu03"}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(BATCH, id="a batch script of sbatch --ntasks=4"),
        pytest.param({**BATCH, **ONE_TASK}, id="srun -n 1 in it"),
        pytest.param({**BATCH, **ONE_TASK, "SLURM_STEP_ID": "4294967290"}, id="the interactive step of salloc -n 4"),
    ],
)
def test_one_task_on_one_node_is_one_machine(environ: dict[str, str]) -> None:
    assert detect_role(environ) == Node()


def test_the_command_line_wins_over_a_step_of_several_tasks() -> None:
    assert detect_role({"SLURM_STEP_NUM_TASKS": "4"}, NodeOptions(nnodes=1)) == Node()


def test_a_worker_that_srun_has_numbered_is_one_of_its_tasks() -> None:
    worker = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", **MASTER}
    assert detect_role({**worker, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}) == Worker(3, 4, 3)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[07,9],m2", "n07"), ("a1,n[3-5]", "a1"), ("r[1-2]x,b", "r1x")],
)
def test_the_first_of_slurms_shortened_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_a_rank_without_a_world_size_is_told_to_say_how_many_machines_there_are() -> None:
    refused = refusal(RANK="2", MASTER_ADDR="10.0.0.1")
    assert "WORLD_SIZE is not set" in refused.what
    assert "--nnodes N" in refused.fix and "RANK and MASTER_ADDR are read from the environment" in refused.fix
    node = detect_role({"RANK": "2", "MASTER_ADDR": "10.0.0.1"}, NodeOptions(nnodes=3))  # and that is all it takes
    assert node == Node(3, 2, "10.0.0.1", 29500)


def test_a_masters_address_that_nobody_meets_at_is_named_unless_it_is_this_machine() -> None:
    notice = unused_master({"MASTER_ADDR": "10.0.0.1"}, NodeOptions())
    assert notice is not None and "10.0.0.1" in notice and "--nnodes N --node-rank R" in notice
    for address in ("localhost", "127.0.0.1", ""):
        assert unused_master({"MASTER_ADDR": address}, NodeOptions()) is None
    assert unused_master({"MASTER_ADDR": "10.0.0.1"}, NodeOptions(nnodes=1)) is None
    assert unused_master({}, NodeOptions()) is None
