"""The best checkpoint of a run on several processes: its noise, and a `final/` that training itself would have written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from running import Command, events
from toys import WORDS, toy_config, toy_wrapper

pytestmark = pytest.mark.slow
TRAIN = {
    "max_steps": 12, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True, "save_strategy": "steps",
    "save_steps": 3, "per_device_eval_batch_size": 1, "learning_rate": 5e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_wrapper(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every step of training makes the validation rows less likely: they have other words."""
    folder = tmp_path_factory.mktemp("data")
    for name, words, rows in (("train", WORDS[:30], 60), ("validation", WORDS[30:], 20)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for row in range(rows):
                some = [words[(row * 7 + at) % 30] for at in range(2 + row % 7)]
                file.write(json.dumps({"question": " ".join(some), "answer": " ".join(reversed(some))}) + "\n")
    return folder


def trained(
    shardtune: Command, folder: Path, model: Path, data: Path, *, processes: int, **train: object
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder.mkdir()
    config = toy_config(
        folder, model, data, lora={"target_modules": ["attention", "mlp"]}, data={"val_split": "validation"},
        train={**TRAIN, "effective_batch_size": 4, "per_device_train_batch_size": 2, **train},
    )  # fmt: skip
    result = shardtune("train", config, "--nproc", processes, "--run-id", "run")
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "run", result


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, shared_shardtune: Command, model: Path, data: Path
) -> dict[str, Path]:
    """The same training on two processes, publishing its last step and its best one; and on one process."""
    root = tmp_path_factory.mktemp("runs")
    cases = {"last": (2, False), "best": (2, True), "alone": (1, False)}
    return {
        name: trained(
            shared_shardtune, root / name, model, data, processes=processes, load_best_model_at_end=load_best
        )[0]
        for name, (processes, load_best) in cases.items()
    }


def test_the_groups_of_an_evaluation_are_the_same_rows_on_any_number_of_processes(runs: dict[str, Path]) -> None:
    of_two, of_one = (events(runs[name], "eval")[0] for name in ("last", "alone"))
    assert of_two["step"] == of_one["step"] == 0
    assert of_two["groups"]["tokens"] == of_one["groups"]["tokens"] and len(of_one["groups"]["tokens"]) > 2
    for name in ("loss", "entropy", "token_accuracy"):
        assert of_two["groups"][name] == pytest.approx(of_one["groups"][name], rel=1e-5)
    assert events(runs["last"], "eval", rank=1)[0]["groups"] == of_two["groups"]


def test_groups_add_up_to_the_loss(runs: dict[str, Path]) -> None:
    for event in events(runs["last"], "eval"):
        groups = event["groups"]
        assert sum(groups["tokens"]) == event["tokens"]
        for name in ("loss", "entropy", "token_accuracy"):
            mean = sum(n * value for n, value in zip(groups["tokens"], groups[name], strict=True)) / event["tokens"]
            assert mean == pytest.approx(event[name], rel=1e-6), name


def test_final_made_from_a_checkpoint_is_what_training_would_have_published(
    runs: dict[str, Path], shared_shardtune: Command
) -> None:
    last, best = runs["last"] / "final", runs["best"] / "final"
    wanted = json.loads((best / "source.json").read_text())
    assert json.loads((last / "source.json").read_text())["step"] == 12
    assert wanted["step"] < 12
    result = shared_shardtune("best", runs["last"], "--to-final", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["best"]["step"] == wanted["step"]
    names = sorted(path.relative_to(best) for path in best.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(last) for path in last.rglob("*") if path.is_file())
    assert Path("on-wrapper/adapter_model.safetensors") in names
    for name in names:
        if name.name == "source.json":
            assert json.loads((last / name).read_text())["step"] == wanted["step"]
        elif name.suffix == ".safetensors":
            from safetensors.torch import load_file

            one, other = load_file(last / name), load_file(best / name)
            assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one), name
        else:
            assert (last / name).read_bytes() == (best / name).read_bytes(), name


def test_a_finished_run_without_its_final_gets_it_back_by_the_command_that_it_is_told(
    runs: dict[str, Path], shared_shardtune: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["alone"], run)
    shutil.rmtree(run / "final")
    told = shared_shardtune("generate", run, "--prompt", "x")
    command = re.search(r"shardtune (train .*?) \(started", told.stderr)
    assert told.returncode == 2 and command is not None, told.stderr
    result = shared_shardtune(*command[1].split(), "--nproc", 1)
    assert result.returncode == 0, result.stderr
    assert "resume" in result.stdout and "step 12 of 12" in result.stdout
    assert not list(tmp_path.glob("run-*")) and (run / "final" / "tokenizer.json").is_file()
    weights = Path("final") / "adapter_model.safetensors"
    assert (run / weights).read_bytes() == (runs["alone"] / weights).read_bytes()


def test_a_final_that_was_cut_short_is_written_again(
    runs: dict[str, Path], shared_shardtune: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["best"], run)
    wanted = {path.name: path.read_bytes() for path in (run / "final").iterdir() if path.is_file()}
    file = run / "final" / "adapter_model.safetensors"
    file.write_bytes(wanted[file.name][:-100])
    result = shared_shardtune("best", run, "--to-final")
    assert result.returncode == 0 and "damaged, and left out: final/" in " ".join(result.stdout.split()), result.stdout
    assert file.read_bytes() == wanted[file.name], "the same bytes as those that training published"
    assert (run / "final" / "tokenizer.json").read_bytes() == wanted["tokenizer.json"]
    assert not list(run.glob("final-*"))
