"""What is recorded as the best is what `best` means elsewhere, and `final/` becomes it without ever being half of it."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from shardtune.checkpoint.final import FINAL, FinalSource, read_source, write_source
from shardtune.checkpoint.store import BEST, CheckpointStore
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.inference.source import find_tuned
from shardtune.lease import Lease, looks_alive
from shardtune.run.best import BestStep, record_best
from shardtune.run.folder import LEASE, not_writable

MAPPING = {"^base_model\\.model\\.model\\.": "base_model.model.model.language_model."}


def weights(names: dict[str, bytes]) -> bytes:
    """A safetensors file of one-byte tensors, as the library writes it."""
    header = {
        name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        for at, (name, data) in enumerate(names.items())
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(names.values())


def adapter(step: int, prefix: str = "base_model.model.model.") -> bytes:
    return weights({f"{prefix}layers.0.q_proj.lora_A.weight": bytes([step]), "base_model.model.lm_head.w": b"h"})


def fill(folder: Path, step: int) -> None:
    (folder / "adapter_model.safetensors").write_bytes(adapter(step))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "/m"}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose last step, 30, is in `final/`; step 20 has the lowest eval loss."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    for step, loss in ((10, 1.6), (20, 1.5), (30, 1.7)):
        store_of(run).write(step, lambda folder, step=step: fill(folder, step), {"eval_loss": loss})
    final = run / FINAL
    (final / "on-wrapper").mkdir(parents=True)
    fill(final, 30)
    write_source(final, FinalSource(30, 1.7))
    (final / "tokenizer.json").write_text("tokens")
    (final / "on-wrapper" / "adapter_config.json").write_text("wrapped")
    (final / "on-wrapper" / "key_mapping.json").write_text(json.dumps({"key_mapping": MAPPING}))
    (final / "on-wrapper" / "adapter_model.safetensors").write_bytes(adapter(30, *MAPPING.values()))
    return run


def store_of(run: Path) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", keep=None)


def by_accuracy(step: int) -> BestStep:
    return BestStep(step, "token_accuracy", 0.5, 1.6)


def test_best_means_what_was_chosen_until_the_run_saves_again(run: Path) -> None:
    assert record_best(run, by_accuracy(10), to_final=False).pointer.endswith("/best names step 10 (was step 20)")
    assert record_best(run, by_accuracy(10), to_final=False).pointer.endswith("/best names step 10")
    store = store_of(run)
    assert store.best() == (10, 1.6) and (store.folder / BEST).read_text() == "step-000010\n"
    config = "model: {model_name_or_path: org/model}\ndata: {dataset_name_or_path: d}\ntrain: {max_steps: 1}\n"
    (run / "config.yaml").write_text(config)
    assert find_tuned(str(run), checkpoint="best", base=str(run)).step == 10
    assert next(iter(store.by_eval_loss())) == (20, 1.5), "load_best_model_at_end keeps to the eval loss"
    store.write(40, lambda folder: fill(folder, 40), {"eval_loss": 1.9})
    assert store.best() == (20, 1.5) and (store.folder / BEST).read_text() == "step-000020\n"


def test_no_save_deletes_the_best_intact_checkpoint_in_favour_of_one_found_damaged(run: Path) -> None:
    (store_of(run).path(20) / "adapter_model.safetensors").write_bytes(adapter(99))
    record_best(run, BestStep(10, "loss", 1.6, 1.6), to_final=False)
    store = CheckpointStore(run / "checkpoints", keep=2)
    store.write(40, lambda folder: fill(folder, 40), {"eval_loss": 1.9})
    assert store.steps() == [10, 30, 40] and store.best() == (10, 1.6)
    store.write(50, lambda folder: fill(folder, 50), {"eval_loss": 1.55})
    assert store.steps() == [40, 50] and store.best() == (50, 1.55) and store.choice() is None


def test_the_lowest_eval_loss_takes_a_choice_back(run: Path) -> None:
    record_best(run, by_accuracy(10), to_final=False)
    record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=False)
    assert store_of(run).best() == (20, 1.5) and store_of(run).choice() is None


def test_a_choice_whose_checkpoint_is_gone_means_nothing(run: Path) -> None:
    record_best(run, by_accuracy(10), to_final=False)
    store_of(run).set_aside(10)
    assert store_of(run).best() == (20, 1.5)


def test_a_checkpoint_whose_eval_loss_was_not_recorded_gets_it(run: Path) -> None:
    store_of(run).write(40, lambda folder: fill(folder, 40), {})
    record_best(run, BestStep(40, "loss", 1.2, 1.2), to_final=False)
    assert store_of(run).best() == (40, 1.2)


def test_final_becomes_that_checkpoint_and_keeps_its_tokenizer(run: Path) -> None:
    done = record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert done.final == f"{run / FINAL} is step 20 now" and done.kept is None
    final = run / FINAL
    assert (final / "adapter_model.safetensors").read_bytes() == adapter(20)
    assert (final / "on-wrapper" / "adapter_config.json").read_text() == "wrapped"
    assert (final / "tokenizer.json").read_text() == "tokens"
    assert read_source(final) == FinalSource(20, 1.5, "loss", 1.5)
    assert {path.name for path in run.iterdir()} == {"run.json", "checkpoints", FINAL}
    assert "unchanged" in record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True).final


def test_its_form_for_the_vision_and_text_model_has_the_same_tensors_under_the_other_names(run: Path) -> None:
    from safetensors.numpy import load_file

    record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    found = load_file(run / FINAL / "on-wrapper" / "adapter_model.safetensors")
    assert {name: bytes(value) for name, value in found.items()} == {
        "base_model.model.model.language_model.layers.0.q_proj.lora_A.weight": bytes([20]),
        "base_model.model.lm_head.w": b"h",
    }


def test_names_that_do_not_follow_from_their_mapping_are_refused_and_final_stays(run: Path) -> None:
    mapping = run / FINAL / "on-wrapper" / "key_mapping.json"
    mapping.write_text(json.dumps({"key_mapping": {}}))
    with pytest.raises(ShardtuneError, match="do not follow"):
        record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert (run / FINAL / "adapter_model.safetensors").read_bytes() == adapter(30)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_weights_that_are_in_no_checkpoint_are_kept_beside_it(run: Path) -> None:
    fill(run / FINAL, 35)
    write_source(run / FINAL, FinalSource(35, 1.8))
    done = record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert done.kept == run / "final-step-000035"
    assert (done.kept / "adapter_model.safetensors").read_bytes() == adapter(35)
    assert (done.kept / "tokenizer.json").is_file()


def test_the_only_intact_copy_of_weights_is_kept(run: Path) -> None:
    (store_of(run).path(30) / "adapter_model.safetensors").write_bytes(adapter(99))
    done = record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert done.kept == run / "final-step-000030"
    assert (done.kept / "adapter_model.safetensors").read_bytes() == adapter(30)


def test_a_damaged_final_is_written_again_from_the_checkpoint_and_not_kept(run: Path) -> None:
    from safetensors.numpy import load_file

    for damaged in (
        run / FINAL / "adapter_model.safetensors",
        run / FINAL / "adapter_config.json",
        run / FINAL / "on-wrapper" / "adapter_model.safetensors",
    ):
        for content in (damaged.read_bytes()[:-1], b""):
            damaged.write_bytes(content)
            done = record_best(run, BestStep(30, "loss", 1.7, 1.7), to_final=True)
            assert done.final == f"{run / FINAL} is step 30 now" and done.kept is None, damaged
            assert (run / FINAL / "adapter_model.safetensors").read_bytes() == adapter(30)
            assert "unchanged" in record_best(run, BestStep(30, "loss", 1.7, 1.7), to_final=True).final
    written = load_file(run / FINAL / "on-wrapper" / "adapter_model.safetensors")
    assert bytes(written["base_model.model.model.language_model.layers.0.q_proj.lora_A.weight"]) == bytes([30])
    data = adapter(30)
    (run / FINAL / "adapter_model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True).kept is None
    assert {path.name for path in run.iterdir()} == {"run.json", "checkpoints", FINAL}


def test_weights_deleted_from_final_are_written_again(run: Path) -> None:
    (run / FINAL / "adapter_model.safetensors").unlink()
    done = record_best(run, BestStep(30, "loss", 1.7, 1.7), to_final=True)
    assert done.final == f"{run / FINAL} is step 30 now" and done.kept is None
    assert (run / FINAL / "adapter_model.safetensors").read_bytes() == adapter(30)


def test_the_pointer_names_an_intact_checkpoint_where_final_alone_has_the_best_weights(run: Path) -> None:
    (store_of(run).path(20) / "adapter_model.safetensors").write_bytes(adapter(99))
    done = record_best(run, BestStep(10, "loss", 1.6, 1.6), to_final=True, in_final=20)
    assert (
        done.pointer.endswith("names step 10 (was step 20): the weights of step 20 are in final/ alone")
        and not done.final
    )
    assert store_of(run).best() == (10, 1.6), "not the damaged one, whose manifest still has a lower loss"
    assert read_source(run / FINAL) == FinalSource(30, 1.7)
    assert "not written" in record_best(run, None, to_final=True, in_final=20).pointer


def test_a_run_in_progress_is_not_written_to(run: Path) -> None:
    lease = Lease.take(run / LEASE)
    assert lease is not None
    done = record_best(run, by_accuracy(10), to_final=False)
    assert done.pointer.startswith("not written, the run is in progress")
    with pytest.raises(UserInputError, match="in progress"):
        record_best(run, by_accuracy(10), to_final=True)
    lease.release()
    assert store_of(run).best() == (20, 1.5) and read_source(run / FINAL) == FinalSource(30, 1.7)


def test_without_a_final_the_checkpoint_itself_is_named(run: Path) -> None:
    (run / FINAL).rename(run / "away")
    with pytest.raises(UserInputError, match="has no final/") as refused:
        record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert str(store_of(run).path(20)) in str(refused.value.fix)
    assert "Resume the run to its end" in str(refused.value.fix)
    (run / "run.json").write_text(json.dumps({"finished": True}))
    with pytest.raises(UserInputError, match="has no final/ any more") as refused:
        record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert f"shardtune train {run}/config.yaml --resume {run} " in str(refused.value.fix) and "to its end" not in str(
        refused.value.fix
    )


def test_a_run_that_died_keeps_the_record_by_which_the_report_knows_it(run: Path) -> None:
    died = json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"})
    (run / LEASE).write_text(died)
    record_best(run, by_accuracy(10), to_final=False)
    assert store_of(run).best() == (10, 1.6) and (run / LEASE).read_text() == died
    record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert (run / LEASE).read_text() == died
    (run / FINAL).rename(run / "away")
    with pytest.raises(UserInputError, match="has no final/"):
        record_best(run, by_accuracy(10), to_final=True)
    assert looks_alive(run / LEASE) is False
    assert store_of(run).best() == (20, 1.5), "refused before anything was written"


def test_a_run_that_cannot_be_written_has_the_best_in_final_already(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(folder: Path) -> None:
        raise not_writable(folder, OSError(errno.EROFS, "Read-only file system"))

    monkeypatch.setattr("shardtune.run.best.hold_run_folder", read_only)
    done = record_best(run, BestStep(30, "loss", 1.7, 1.7), to_final=True)
    assert done.final == "unchanged: final/ is step 30 already" and done.pointer.startswith("not written: Cannot write")
    with pytest.raises(UserInputError, match="Cannot write"):
        record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)


def test_a_link_in_final_is_refused(run: Path) -> None:
    (run / FINAL / "tokenizer_config.json").symlink_to("/etc/passwd")
    with pytest.raises(UserInputError, match="not a plain file"):
        record_best(run, BestStep(20, "loss", 1.5, 1.5), to_final=True)
    assert read_source(run / FINAL) == FinalSource(30, 1.7)
