"""A run that was interrupted ends with the very bits of one that was not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from interrupted import evaluations, final_weights, lines, run
from running import events
from safetensors.torch import load_file
from toys import toy_config

from shardtune.checkpoint.snapshot import Snapshot
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.lease import Lease
from shardtune.run import folder as run_folder_module
from shardtune.run.folder import LEASE
from shardtune.train import saving

# 11 packed rows in steps of 4: 3 steps an epoch, the last of them smaller. Log lines every 3 steps (and the first), so
# that checkpoints lie between lines.
TRAIN: dict[str, Any] = {
    "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 4,
    "save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "warmup_ratio": 0.2, "packing": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("resume"), toy_model, toy_data,
        data={"val_split": "validation"}, lora={"lora_dropout": 0.3}, train=TRAIN,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    assert run(config, run_id="undisturbed") == 0
    return config.parent / "runs" / "undisturbed"


def assert_same(folder: Path, undisturbed: Path) -> None:
    assert lines(folder) == lines(undisturbed)
    assert evaluations(folder) == evaluations(undisturbed)
    assert final_weights(folder) == final_weights(undisturbed)


@pytest.mark.parametrize(  # an epoch's end; mid-epoch and between two log lines; the second epoch
    "step", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_run_stopped_on_request_goes_on_to_the_same_bits(config: Path, undisturbed: Path, step: int) -> None:
    name = f"stopped{step}"
    assert run(config, run_id=name, stop_at=step) == 75
    folder = config.parent / "runs" / name
    assert CheckpointStore(folder / "checkpoints", None).steps()[-1] == step
    assert run(config, run_id=name) == 0
    assert_same(folder, undisturbed)
    assert events(folder, "resume")[0]["step"] == step


def test_a_run_that_broke_down_several_times_ends_with_the_same_bits(config: Path, undisturbed: Path) -> None:
    """Right after a save, a step after one, and before the first."""
    for step in (1, 3, 4, 9):
        assert run(config, run_id="broken", crash_at=step) is None
    assert run(config, run_id="broken") == 0
    folder = config.parent / "runs" / "broken"
    assert_same(folder, undisturbed)
    assert [event["step"] for event in events(folder, "resume")] == [2, 4, 8]
    history = [
        json.loads((one / "checkpoints/step-000010/trainer.json").read_text())["log_history"]
        for one in (folder, undisturbed)
    ]
    for entry in (*history[0], *history[1]):
        for name in [name for name in entry if name.endswith(("runtime", "per_second"))]:
            del entry[name]
    assert history[0] == history[1] and history[0][-1]["step"] == 10


def test_a_run_that_broke_down_before_its_final_adapter_writes_it_without_another_step(
    config: Path, undisturbed: Path
) -> None:
    assert run(config, run_id="ended", crash_at=10) is None
    folder = config.parent / "runs" / "ended"
    assert not (folder / "final").exists()
    assert run(config, run_id="ended") == 0
    assert_same(folder, undisturbed)


@pytest.mark.slow
def test_what_an_epochs_end_brings_is_not_lost(config: Path) -> None:
    """Evaluated by epoch, saved by steps: the save of an epoch's last step comes before that epoch's evaluation."""
    by_epoch = ("train.eval_strategy=epoch", "train.save_steps=1", "train.max_steps=7", "train.save_total_limit=null")
    assert run(config, *by_epoch, run_id="epochs") == 0
    whole = config.parent / "runs" / "epochs"
    assert list(evaluations(whole)) == [3, 6, 7]
    for step, ending in ((2, "stop_at"), (3, "stop_at"), (3, "crash_at")):
        name = f"epochs-{ending}-{step}"
        run(config, *by_epoch, run_id=name, **{ending: step})
        assert step < 3 or ending == "stop_at" or list(evaluations(config.parent / "runs" / name)) == []
        assert step >= 3 or list(evaluations(config.parent / "runs" / name)) == []  # cut short, not ended
        assert run(config, *by_epoch, run_id=name) == 0
        assert_same(config.parent / "runs" / name, whole)


def test_plain_sgd_has_nothing_to_remember_and_goes_on_too(config: Path) -> None:
    sgd = ("train.optim=sgd", "train.max_steps=4", "train.learning_rate=1.0")
    assert run(config, *sgd, run_id="sgd-whole") == 0
    assert run(config, *sgd, run_id="sgd", stop_at=3) == 75
    assert run(config, *sgd, run_id="sgd") == 0
    assert_same(config.parent / "runs" / "sgd", config.parent / "runs" / "sgd-whole")


def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(
    config: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, run_id="damaged", crash_at=5) is None
    folder = config.parent / "runs" / "damaged"
    file = folder / "checkpoints" / "step-000004" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserInputError, match=r"(?s)step-000004 is damaged.*optimizer.safetensors: changed"):
        run(config, f"train.resume={file.parent}")
    assert run(config, run_id="damaged") == 0
    assert "step-000004: optimizer.safetensors: changed" in " ".join(capsys.readouterr().out.split())
    (resumed,) = events(folder, "resume")
    assert resumed["step"] == 2 and "optimizer.safetensors: changed" in resumed["damaged"][0]
    assert len(list((folder / "checkpoints").glob("damaged-step-000004-*"))) == 1
    assert_same(folder, undisturbed)


def test_with_every_checkpoint_damaged_nothing_starts_over_silently(config: Path) -> None:
    assert run(config, run_id="ruined", stop_at=1) == 75
    (config.parent / "runs/ruined/checkpoints/step-000001/trainer.json").write_text("{}")
    with pytest.raises(ShardtuneError, match=r"(?s)Every checkpoint.*trainer.json: truncated.*--resume never"):
        run(config, run_id="ruined")


def test_a_full_disk_is_told_and_training_goes_on(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Snapshot.write

    def full(self: Snapshot, folder: Path, adapter_config: Any) -> None:
        write(self, folder, adapter_config)
        if self.trainer["step"] in (4, 6):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Snapshot, "write", full)
    assert run(config, run_id="full") == 0
    folder = config.parent / "runs" / "full"
    assert [(e["step"], e["in_a_row"]) for e in events(folder, "checkpoint_failed")] == [(4, 1), (6, 2)]
    assert CheckpointStore(folder / "checkpoints", None).steps() == [2, 8, 10]
    told = " ".join(capsys.readouterr().out.split())
    assert "checkpoint of step 4" in told and "No space left on device" in told and "2 in a row" in told
    assert "the last good one is step 2" in told
    assert_same(folder, undisturbed)


def test_a_mistake_in_the_writing_thread_ends_the_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Snapshot, folder: Path, adapter_config: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Snapshot, "write", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        run(config, run_id="mistake")


def test_minutes_ask_for_checkpoints_too_and_a_large_state_is_waited_for(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "free_memory", lambda: 100)
    always = ("train.save_strategy=no", "train.max_steps=3", "train.save_minutes=1e-9")
    assert run(config, *always, run_id="minutes") == 0
    folder = config.parent / "runs" / "minutes"
    assert [event["step"] for event in events(folder, "checkpoint")] == [1, 2, 3]
    assert {event["background_seconds"] for event in events(folder, "checkpoint")} == {0.0}
    assert run(config, *always[:2], "train.save_minutes=60", run_id="hour") == 0
    assert events(config.parent / "runs" / "hour", "checkpoint") == []


def test_a_save_gathers_what_trains_and_its_optimizer_state_and_nothing_of_the_base(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import DTensor

    gathered: list[int] = []
    full_tensor = DTensor.full_tensor
    save = saving.CheckpointSaver.save

    def counted(self: DTensor, **given: Any) -> Any:
        gathered.append(self.numel())
        return full_tensor(self, **given)

    def watched(self: saving.CheckpointSaver, trainer: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", counted)
            save(self, trainer)

    monkeypatch.setattr(saving.CheckpointSaver, "save", watched)
    assert run(config, "train.max_steps=2", run_id="gathered") == 0
    folder = config.parent / "runs/gathered/checkpoints/step-000002"
    adapter = sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert sum(gathered) == 3 * adapter > 0
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}  # no pickle
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_the_best_is_loaded_at_the_end_also_when_it_was_found_before_the_interruption(config: Path) -> None:
    rising = (
        "train.load_best_model_at_end=true", "train.learning_rate=0.5", "train.lr_scheduler_type=constant",
        "train.save_total_limit=1", "train.max_steps=8", "train.warmup_ratio=0", "lora.lora_dropout=0",
    )  # fmt: skip
    assert run(config, *rising, run_id="best-whole") == 0
    whole = config.parent / "runs" / "best-whole"
    losses = evaluations(whole)
    best = min(losses, key=losses.__getitem__)
    assert best < 7, "the case this test is about did not arise"
    assert run(config, *rising, run_id="best", crash_at=7) is None
    assert run(config, *rising, run_id="best") == 0
    folder = config.parent / "runs" / "best"
    assert_same(folder, whole)
    assert final_weights(folder) == (folder / f"checkpoints/step-{best:06d}/adapter_model.safetensors").read_bytes()
    assert (folder / "checkpoints" / "best").read_text() == f"step-{best:06d}\n"
    # Going on from the best is another run: what this one did after it stays.
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert run(config, *rising, "train.resume=best", "train.max_steps=8", run_id="best") == 0
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before
    newest = max((config.parent / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    assert newest != folder and events(newest, "resume")[0]["step"] == best
    assert evaluations(newest) == {step: loss for step, loss in losses.items() if step > best}


def test_a_changed_config_is_told_or_refused(config: Path, toy_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, run_id="changed", stop_at=2) == 75
    folder = config.parent / "runs" / "changed"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    latest = "train.resume=latest"
    with pytest.raises(UserInputError, match=r"(?s)lora.r: 4 → 8 \(.*train.seed: 42 → 1 \(.*--resume never"):
        run(config, latest, "lora.r=8", "train.seed=1", "train.learning_rate=0.5", run_id="changed")
    with pytest.raises(UserInputError, match=r"(?s)from 4 to 6 rows.*2 × 1 × 2.*3 × 1 × 2.*batch_size: 2 and .*: 2"):
        run(config, latest, "train.per_device_train_batch_size=3", run_id="changed")
    with pytest.raises(UserInputError, match="step 2, past the 1 steps"):
        run(config, latest, "train.max_steps=1", "train.warmup_steps=0", run_id="changed")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    same_batch = ("train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=1")
    assert run(config, latest, "train.learning_rate=0.5", "train.max_steps=4", *same_batch, run_id="changed") == 0
    (resumed,) = events(folder, "resume")
    assert [text.partition(" (")[0] for text in resumed["changes"]] == [
        "train.max_steps: 10 → 4", "train.learning_rate: 0.01 → 0.5", "batch: 2 × 1 × 2 → 4 × 1 × 1",
    ]  # fmt: skip
    assert "train.learning_rate: 0.01 → 0.5" in capsys.readouterr().out
    assert lines(folder)[4]["learning_rate"] > 0.01


def test_other_rows_under_the_same_name_are_refused(config: Path, toy_data: Path, tmp_path: Path) -> None:
    rows = shutil.copytree(toy_data, tmp_path / "rows")
    here = f"data.dataset_name_or_path={rows}"
    assert run(config, here, run_id="rows", stop_at=1) == 75
    file = rows / "train.jsonl"
    file.write_text(file.read_text().replace("w01", "w02"))
    with pytest.raises(UserInputError, match="the same settings now give different rows"):
        run(config, here, run_id="rows")


def test_a_finished_run_is_not_continued_but_can_be_made_longer(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = (f"train.output_dir={config.parent / 'lengths'}", "train.max_steps=2")
    assert run(config, *mine) == 0
    assert run(config, *mine) == 0
    assert "is finished" in " ".join(capsys.readouterr().out.split())
    first, second = sorted((config.parent / "lengths").iterdir(), key=lambda path: path.stat().st_mtime)
    assert events(second, "resume") == []
    assert run(config, *mine, "train.resume=latest", "train.max_steps=4", run_id=second.name) == 0
    (resumed,) = events(second, "resume")
    assert resumed["step"] == 2 and "train.max_steps: 2 → 4" in resumed["changes"][0]
    assert max(lines(second)) == 4 and max(lines(first)) == 2


def test_a_run_that_is_alive_is_not_joined(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder_module, "_LEASE_SECONDS", 0.0)
    assert run(config, run_id="alive", stop_at=1) == 75
    lease = Lease.take(config.parent / "runs" / "alive" / LEASE)
    assert lease is not None
    with pytest.raises(UserInputError, match=rf"(?s)in use by another process.*process {os.getpid()}"):
        run(config, run_id="alive")
    lease.release()


def test_no_secret_reaches_a_checkpoint_or_any_other_file_of_the_run(config: Path) -> None:
    assert run(config, "cluster.env.HF_TOKEN=hunter2secret", "train.max_steps=1", run_id="secret") == 0
    folder = config.parent / "runs" / "secret"
    assert "HF_TOKEN" in (folder / "config.yaml").read_text()
    for path in folder.rglob("*"):
        assert path.is_dir() or b"hunter2secret" not in path.read_bytes(), path
