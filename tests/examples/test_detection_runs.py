"""examples/retinanet through `shardtune run`: one result for any number of processes, resumed exactly, and it learns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import REPOSITORY, Command, events
from shapes import make_set

TRAIN = REPOSITORY / "examples" / "retinanet" / "train.py"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes")
    make_set(out, train=18, val=6, image_size=64, seed=1)
    return out


@pytest.fixture
def words(shapes: Path, tmp_path: Path, environment: dict[str, str]) -> list[str]:
    """`shardtune run` up to the number of processes; the packages of these tests are seen by the ranks, too."""
    environment["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    return ["run", "--skip-preflight", "-o", f"train.output_dir={tmp_path / 'runs'}"]


def script(shapes: Path, **options: object) -> list[str]:
    values = {"local_image_dir": shapes, "image_size": 64, "num_workers": 0, "debug_freq": 1, "epochs": 2, **options}
    return [
        "--",
        str(TRAIN),
        *(str(w) for name, value in values.items() for w in (f"--{name.replace('_', '-')}", value)),
    ]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["values"]["loss"] for event in events(run, "metrics") if "loss" in event["values"]}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "final" / "model.pt", weights_only=True)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_one_and_two_processes_train_the_same(
    shardtune: Command, words: list[str], shapes: Path, tmp_path: Path
) -> None:
    runs = {
        "one": (1, {"batch_size": 4}),
        "two": (2, {"batch_size": 2}),
        "accumulated": (2, {"batch_size": 1, "accum_steps": 2}),
    }
    for name, (nproc, options) in runs.items():
        done = shardtune(*words, "--nproc", nproc, "--name", name, *script(shapes, epochs=1, **options))
        assert done.returncode == 0, done.stderr
        assert "= 4 images per step" in done.stdout and "4 per epoch" in done.stdout
        assert "2 other images are left out of each epoch" in done.stdout
    reference = losses(tmp_path / "runs" / "one")
    assert list(reference) == [1, 2, 3, 4]
    for name in ("two", "accumulated"):
        assert losses(tmp_path / "runs" / name) == pytest.approx(reference, rel=2e-3), name
    scores = [events(tmp_path / "runs" / name, "metrics")[-1]["values"] for name in runs]
    assert scores[1]["val/mAP"] == pytest.approx(scores[0]["val/mAP"], abs=0.02)


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_run_end_with_the_weights_of_an_undisturbed_one(
    shardtune: Command, words: list[str], environment: dict[str, str], shapes: Path, tmp_path: Path
) -> None:
    options = script(shapes, batch_size=2, save_steps=1)
    assert shardtune(*words, "--nproc", 2, "--name", "undisturbed", *options).returncode == 0
    undisturbed = weights(tmp_path / "runs" / "undisturbed")

    killed = tmp_path / "runs" / "killed"
    command = [sys.executable, "-m", "shardtune", *words, "--nproc", "2", "--name", "killed", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(killed, 2, process)
    process.kill()
    process.wait(timeout=60)
    again = shardtune(*words, "--nproc", 2, "--name", "killed", *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert "started again" in again.stdout and "resume    step " in again.stdout
    assert equal(weights(killed), undisturbed)

    restarted = tmp_path / "runs" / "restarted"
    command = [*command[: command.index("--name")], "--name", "restarted", "--max-restarts", "1", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(restarted, 5, process)
    os.kill(rank_of(restarted, 1), signal.SIGKILL)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "killed by signal 9" in said, said
    assert equal(weights(restarted), undisturbed)
    assert losses(restarted).keys() == losses(killed).keys() == set(range(1, 9))


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_elsewhere(
    shardtune: Command, words: list[str], environment: dict[str, str], shapes: Path, tmp_path: Path
) -> None:
    options = script(shapes, batch_size=2, epochs=4)
    command = [sys.executable, "-m", "shardtune", *words, "--nproc", "2", "--name", "stopped", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
    process.wait(timeout=100)
    stopped = tmp_path / "runs" / "stopped"
    assert process.returncode == 75 and [event["step"] for event in events(stopped, "checkpoint")]
    other = shardtune(
        *words, "--nproc", 1, "--name", "other", *script(shapes, batch_size=4, epochs=4), "--resume", stopped
    )
    assert other.returncode == 0, other.stderr
    step = events(stopped, "checkpoint")[-1]["step"]
    assert f"resume    step {step} from {stopped}" in other.stdout
    assert min(losses(tmp_path / "runs" / "other")) == step + 1
    wrong = shardtune(*words, "--nproc", 1, "--name", "x", *script(shapes, batch_size=2, epochs=4), "--resume", stopped)
    assert wrong.returncode == 2 and "another effective batch: 4, now 2" in wrong.stderr


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 150
    while not (run / "checkpoints" / f"step-{step:06d}").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def rank_of(run: Path, rank: int) -> int:
    """The process of a rank, by its environment."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"RANK={rank}".encode(), f"TORCHELASTIC_RUN_ID={run.name}".encode()} <= set(found):
            return int(entry.parent.name)
    raise AssertionError("no such process")


def test_bad_data_ends_the_run_with_its_place_and_no_traceback(
    shardtune: Command, words: list[str], environment: dict[str, str], shapes: Path, tmp_path: Path
) -> None:
    rows = (shapes / "train.csv").read_text().splitlines()
    bad = tmp_path / "bad.csv"
    bad.write_text("\n".join([*rows[:2], rows[2].replace("/m/", "/x/")]) + "\n")
    options = script(shapes, annotations=bad, batch_size=1)
    refused = shardtune(*words, "--nproc", 1, *options)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"error: Wrong in the data: boxes of unknown classes: 1\n  {bad}:3: the class '/x/" in refused.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_it_learns_shapes_on_two_cpus_within_minutes(
    shardtune: Command, words: list[str], shapes: Path, tmp_path: Path
) -> None:
    make_set(tmp_path / "shapes", train=320, val=48, image_size=128, seed=11)
    options = script(tmp_path / "shapes", image_size=128, batch_size=4, epochs=3, debug_freq=10)
    done = shardtune(*words, "--nproc", 2, "--name", "shapes", *options, timeout=560)
    assert done.returncode == 0, done.stderr
    curve = [
        e["values"]["val/mAP@50"]
        for e in events(tmp_path / "runs" / "shapes", "metrics")
        if "val/mAP@50" in e["values"]
    ]
    assert len(curve) == 3 and curve[-1] > 0.25 and curve[-1] > curve[0] + 0.1, curve
