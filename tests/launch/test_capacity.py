"""More processes than a machine can hold are refused before one of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command
from toys import toy_config

from shardtune.errors import UserInputError
from shardtune.launch.capacity import LEAST_BYTES, check_capacity

PLENTY = 1 << 50


def test_as_many_processes_as_fit_are_not_questioned() -> None:
    check_capacity(8, 2, free=8 * LEAST_BYTES)
    check_capacity(64, None, free=PLENTY)  # one per GPU: cores are not what they compute on


def test_too_little_memory_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UserInputError) as caught:
        check_capacity(200, 64, free=24 * 10**9)
    assert caught.value.exit_code == 2
    assert "200 processes" in caught.value.what
    assert "68.4 GiB of memory" in caught.value.why and "22.4 GiB are available" in caught.value.why
    assert f"to {24 * 10**9 // LEAST_BYTES} or less" in caught.value.fix and "--force" in caught.value.fix


def test_too_few_cores_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UserInputError) as caught:
        check_capacity(9, 2, free=PLENTY)
    assert "share 2 CPU cores" in caught.value.why
    assert "to 8 or less" in caught.value.fix


def test_force_goes_on_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check_capacity(9, 2, force=True, free=PLENTY)
    said = capsys.readouterr().err
    assert said.startswith("warning: This machine cannot run 9 processes.") and "--force" in said


def test_ten_thousand_processes_are_refused_on_any_machine_and_nothing_is_started(
    tmp_path: Path, toy_model: Path, toy_data: Path, shardtune: Command
) -> None:
    # Whatever memory and cores this machine has.
    config = toy_config(tmp_path, toy_model, toy_data)
    result = shardtune("train", config, "--nproc", "10000")
    assert result.returncode == 2, result.stderr
    assert "cannot run 10000 processes" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()
