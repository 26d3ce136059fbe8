"""A disk that is full, read-only or gone costs files, never the run: real small disks, filled while a run trains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import REPOSITORY, events
from small_disk import fill, free, small_disk
from toys import toy_config

from shardtune.checkpoint.store import CheckpointStore

Start = Callable[..., "subprocess.Popen[str]"]
WAITS = "Cannot write final/"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for a few checkpoints of a toy (60 kB each)."""
    with small_disk(tmp_path / "disk", 1024) as folder:
        yield folder


@pytest.fixture
def start(tmp_path: Path, disk: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Train 12 steps, saving every second, with faults after some steps."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        faults: dict[int, str], env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE, **train: Any
    ) -> subprocess.Popen[str]:
        settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 2, "output_dir": str(disk), **train}
        config = toy_config(tmp_path, toy_model, toy_data, train=settings)
        told = json.dumps({step: [[what, str(disk)]] for step, what in faults.items()})
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("disk_faults.py"), "train", config, "--run-id", "one"],
            env={**environment, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", "DISK_FAULTS": told,
                 "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=stdout, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], words: str) -> str:
    """Everything up to the line with these words."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said '{words}': {said}\n{process.communicate()[1]}")


def assert_every_event_is_there(run: Path) -> None:
    assert [event["step"] for event in events(run, "step")] == list(range(1, 13))
    assert [event["step"] for event in events(run, "profile")] == list(range(1, 13))
    assert events(run, "run_end")[0]["status"] == "done"


def assert_loads(adapter: Path, toy_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_model), adapter)
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    AutoTokenizer.from_pretrained(adapter)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(start: Start, disk: Path) -> None:
    process = start({2: "fill", 10: "free"})  # eight steps: more events than fit into the rest of a page
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    run = disk / "one"
    assert out.count("events-rank0.jsonl cannot be written: No space left on device.") == 1
    assert out.count("events-rank0.jsonl can be written again") == 1
    assert out.count("Could not write the checkpoint") == 4
    assert_every_event_is_there(run)
    assert [event["step"] for event in events(run, "checkpoint_failed")] == [2, 4, 6, 8]
    assert [event["step"] for event in events(run, "checkpoint")] == [10, 12]
    assert [event["about"] for event in events(run, "warning")] == ["events"]
    assert not list((run / "checkpoints").glob(".*"))
    assert (run / "final" / "adapter_model.safetensors").is_file()
    assert json.loads((run / "run.json").read_text())["finished"] is True


@pytest.mark.slow
def test_at_the_end_it_waits_for_room(start: Start, disk: Path) -> None:
    process = start({5: "fill"})
    said = wait_for_line(process, WAITS)
    assert f"{disk / 'one'}: No space left on device" in said and "Waiting up to 10 minutes" in said
    free(disk)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert_every_event_is_there(disk / "one")
    assert events(disk / "one", "run_end")[0]["adapter"] == str(disk / "one" / "final")
    assert (disk / "one" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_without_room_the_adapter_goes_to_tmpdir_and_the_run_has_ended_well(
    start: Start, tmp_path: Path, toy_model: Path
) -> None:
    """From the first step on, so that no checkpoint is there either."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start({1: "fill"}, {"TMPDIR": str(temporary)}, final_wait_minutes=0.01)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    (adapter,) = temporary.glob("shardtune-one-*/final")
    assert f"The adapter is in {adapter}" in out and f"adapter   {adapter}" in out
    assert "events could not be written to" in out and "are lost: No space left on device" in out
    assert "Cannot write run.json" in out
    assert_loads(adapter, toy_model)


@pytest.mark.slow
def test_with_a_fallback_the_adapter_goes_there_at_once(start: Start, tmp_path: Path, toy_model: Path) -> None:
    process = start({5: "fill"}, fallback_dir=str(tmp_path / "elsewhere"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "Waiting" not in out
    adapter = tmp_path / "elsewhere" / "one" / "final"
    assert f"The adapter is in {adapter}" in out and f"adapter   {adapter}" in out
    assert_loads(adapter, toy_model)


@pytest.mark.slow
def test_a_run_that_is_printed_to_the_full_disk_goes_on(start: Start, disk: Path, tmp_path: Path) -> None:
    with (disk / "log.txt").open("w") as log:
        process = start({1: "fill"}, stdout=log, fallback_dir=str(tmp_path / "elsewhere"))
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, (disk / "log.txt").read_text() + err
    assert (tmp_path / "elsewhere" / "one" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_costs_what_comes_after(start: Start, disk: Path, tmp_path: Path) -> None:
    process = start({5: "make_read_only"}, fallback_dir=str(tmp_path / "elsewhere"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    assert "Read-only file system" in out
    assert (tmp_path / "elsewhere" / "one" / "final" / "adapter_model.safetensors").is_file()
    store = CheckpointStore(disk / "one" / "checkpoints", keep=None)
    assert store.steps() == [2, 4] and store.newest_intact() == (4, [])


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_room(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start({5: "fill"}, {"TMPDIR": str(temporary)}, final_wait_minutes=60)
    wait_for_line(process, WAITS)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert list(temporary.glob("shardtune-one-*/final/adapter_model.safetensors"))


@pytest.mark.slow
def test_where_there_is_no_room_at_all_the_last_checkpoint_is_named(start: Start, disk: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "temporary", 64) as temporary:
        fill(temporary)
        process = start({5: "fill"}, {"TMPDIR": str(temporary)}, final_wait_minutes=0)
        out, err = process.communicate(timeout=300)
        assert [path.name for path in temporary.iterdir()] == ["filler"]
    assert process.returncode == 1, out + err
    assert "Could not write the adapter anywhere" in err and "step-000004" in err and "Traceback" not in err


@pytest.mark.slow
def test_a_tmpdir_that_fills_does_not_touch_a_healthy_run(
    tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    """Two processes: what they tell their launcher needs no disk. If it did, it would take them for hung after 14 s."""
    limits = {"device": "cpu", "step_timeout_minutes": 0.15}
    config = toy_config(tmp_path, toy_model, toy_data, train={"max_steps": 1_000_000}, parallel=limits)
    with small_disk(tmp_path / "temporary", 64) as temporary:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardtune", "train", config, "--run-id", "one", "--nproc", "2"],
            env={**environment, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            wait_for_line(process, "step 1/")
            fill(temporary)
            end = time.monotonic() + 20
            assert process.stdout is not None
            while time.monotonic() < end:
                assert process.stdout.readline(), process.communicate()[1]  # one line a step
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 75, out + err


@pytest.mark.slow
def test_the_other_ranks_outlast_rank_0_s_wait_for_room(
    disk: Path, tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    """It waits longer than a save may take, and longer than a collective."""
    config = toy_config(
        tmp_path, toy_model, toy_data,
        train={"output_dir": str(disk)},
        parallel={"device": "cpu", "checkpoint_timeout_minutes": 0.1, "step_timeout_minutes": 1},
    )  # fmt: skip
    fill_but = 40_000  # room for run.json and a few events, not for the adapter
    (disk / "most").write_bytes(bytes(1024 * 1024 - fill_but))
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", config, "--run-id", "one", "--nproc", "2"],
        env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for_line(process, WAITS)
        time.sleep(15)
        assert process.poll() is None
        (disk / "most").unlink()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, out + err
    assert (disk / "one" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_tracker_that_cannot_write_any_more_costs_what_it_shows(start: Start, disk: Path, tmp_path: Path) -> None:
    # Again and again: a checkpoint that could not be finished in the meantime leaves its room.
    process = start(
        dict.fromkeys(range(3, 12), "fill"), report_to="tensorboard", fallback_dir=str(tmp_path / "elsewhere")
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert out.count("TensorBoard cannot be written: No space left on device.") == 1
    assert (tmp_path / "elsewhere" / "one" / "final" / "adapter_model.safetensors").is_file()
