"""accelerate's file counts machines and processes; a launch with others is refused, or says what that does."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command
from toys import toy_config

from shardtune.config import ResolvedConfig, load_config
from shardtune.errors import UserInputError
from shardtune.launch.accelerate_machines import other_process_count, refuse_lone_machine
from shardtune.launch.process_role import NodeOptions

THREE_MACHINES = "distributed_type: FSDP\nnum_machines: 3\nnum_processes: 6\nfsdp_config: {fsdp_version: 2}\n"


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    (tmp_path / "fsdp.yaml").write_text(THREE_MACHINES)
    train = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return toy_config(tmp_path, toy_model, toy_data, train=train)


def resolved(config: Path, *overrides: str) -> ResolvedConfig:
    return load_config(config, overrides, config.parent / "fsdp.yaml", environ={})


def test_a_file_for_three_machines_is_not_trained_on_one_by_accident(shardtune: Command, config: Path) -> None:
    result = shardtune("train", config, "--accelerate-config", config.parent / "fsdp.yaml")
    said = " ".join(result.stderr.split())
    assert result.returncode == 2, said
    assert "fsdp.yaml sets num_machines: 3" in said
    assert "16 rows per step instead of 48" in said
    assert "--nnodes 3 --node-rank R --master-addr HOST" in said
    assert "--nnodes 1, with -o train.gradient_accumulation_steps=6" in said
    assert not (config.parent / "runs").exists()


def test_whoever_says_how_many_machines_there_are_is_not_asked_again(config: Path) -> None:
    for environ, asked in (
        ({}, NodeOptions(nnodes=1)),
        ({}, NodeOptions(nnodes=3, node_rank=0, master_addr="h")),
        ({"PET_NNODES": "1"}, NodeOptions()),
        ({"SLURM_STEP_NUM_NODES": "3"}, NodeOptions()),
    ):
        refuse_lone_machine(resolved(config), environ, asked, config)
    refuse_lone_machine(resolved(config, "cluster.nodes=1"), {}, NodeOptions(), config)  # the user's own word
    with pytest.raises(UserInputError):
        refuse_lone_machine(resolved(config), {"PET_NPROC_PER_NODE": "2"}, NodeOptions(), config)


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": "auto"}, {"effective_batch_size": 48}], ids=str)
def test_what_chooses_the_accumulation_itself_is_not_multiplied(config: Path, settings: dict[str, object]) -> None:
    """It said `-o train.gradient_accumulation_steps=autoautoauto`, and called a fixed batch a third."""
    words = [f"train.{name}={value}" for name, value in settings.items()]
    if "effective_batch_size" in settings:
        words.append("train.gradient_accumulation_steps=auto")
    with pytest.raises(UserInputError) as refused:
        refuse_lone_machine(resolved(config, *words), {}, NodeOptions(), config)
    assert refused.value.fix.endswith("To train on this machine alone: --nnodes 1.")
    assert ("rows per step" in refused.value.why) == ("effective_batch_size" not in settings)
    notice = other_process_count(resolved(config, *words), 2)
    assert notice is not None and ("rows per step" in notice) == ("effective_batch_size" not in settings)


def test_other_processes_than_the_file_says_are_told_with_both_batches(config: Path) -> None:
    notice = other_process_count(resolved(config), 2)
    assert notice is not None and "num_processes: 6, but this run has 2: 16 rows per step instead of 48" in notice
    assert other_process_count(resolved(config), 6) is None
    assert other_process_count(resolved(config, "parallel.nproc=1"), 1) is None  # asked for on purpose


def test_a_section_nobody_wrote_is_not_told_to_be_unread(config: Path) -> None:
    assert not any("`cluster`" in notice for notice in resolved(config).notices)
    assert any("`cluster`" in notice for notice in resolved(config, "cluster.image=i").notices)


@pytest.mark.slow
def test_alone_on_purpose_it_trains_and_says_what_that_does_to_the_batch(shardtune: Command, config: Path) -> None:
    result = shardtune(
        "train", config, "--accelerate-config", config.parent / "fsdp.yaml", "--nnodes", 1, "-o", "train.max_steps=1"
    )
    assert result.returncode == 0, result.stderr
    assert "16 rows per step instead of 48" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_an_evaluation_is_the_same_on_any_number_of_machines(shardtune: Command, config: Path) -> None:
    file = config.parent / "fsdp.yaml"
    result = shardtune("eval-loss", config, "--accelerate-config", file, "-o", "data.val_split=validation", "--json")
    assert result.returncode == 0, result.stderr
