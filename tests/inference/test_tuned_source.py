"""Which files `RUN|ADAPTER` means, when it is started in another folder, with another base, or when files are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from shardtune.checkpoint.final import FinalSource, write_source
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import UserInputError
from shardtune.inference.source import find_tuned
from shardtune.run.base_model import BaseModel, record_base

_WEIGHTS = "adapter_model.safetensors"


def write_adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    peft = {"peft_type": "LORA", "base_model_name_or_path": "models/base"}
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    save_file({"a": torch.arange(8.0)}, folder / _WEIGHTS)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trained in `project`, which has models/base; commands are started elsewhere."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "models" / "base").mkdir(parents=True)
    (project / "models" / "base" / "config.json").write_text('{"model_type": "llama"}')
    folder = project / "runs" / "one"
    write_adapter(folder / "final")
    config = {
        "model": {"model_name_or_path": "models/base"}, "data": {"dataset_name_or_path": "d"},
        "train": {"max_steps": 1, "output_dir": "runs"},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text("{}")
    for step in (1, 2):
        CheckpointStore(folder / "checkpoints", keep=None).write(step, write_adapter, {})
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return folder


def record(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.chdir(run.parent.parent)
        base = BaseModel.read("models/base", Path("models/base"))
    assert base is not None
    record_base(run, base)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_relative_base_is_found_from_another_folder(
    run: Path, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run.parent.parent / "models" / "base"
    if recorded:
        record(run, monkeypatch)
    tuned = find_tuned(str(run))
    assert (tuned.base.model_name_or_path, tuned.notice) == (str(base), "")
    monkeypatch.chdir(run.parent.parent)
    assert find_tuned(str(run)).base.model_name_or_path == "models/base"


def test_a_base_that_was_local_in_training_and_is_gone_is_not_looked_for_on_the_hub(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(run, monkeypatch)
    base = run.parent.parent / "models" / "base"
    base.rename(base.with_name("moved"))
    with pytest.raises(UserInputError, match="The base model 'models/base' is not there") as refused:
        find_tuned(str(run))
    assert str(base) in refused.value.why and "--model" in refused.value.fix
    assert find_tuned(str(run), base=str(base.with_name("moved"))).notice == ""


def test_another_base_is_noticed_or_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(run, monkeypatch)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama", "rope_theta": 3}')
    assert "Trained on 'models/base', using" in find_tuned(str(run), base=str(tmp_path / "other")).notice
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gemma2"}')
    with pytest.raises(UserInputError, match="was trained on another model: 'models/base'"):
        find_tuned(str(run), base=str(tmp_path / "other"))


@pytest.mark.parametrize("change", [lambda data: data + b"x", lambda data: data[:-3], lambda data: b""])
def test_a_damaged_adapter_is_named_with_the_newest_intact_checkpoint(
    run: Path, change: object, tmp_path: Path
) -> None:
    file = run / "final" / _WEIGHTS
    file.write_bytes(change(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserInputError, match="final' is damaged") as refused:
        find_tuned(str(run))
    assert _WEIGHTS in refused.value.why and "step 2" in refused.value.fix
    write_adapter(tmp_path / "copy")
    file = tmp_path / "copy" / _WEIGHTS
    file.write_bytes(change(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserInputError, match="copy' is damaged") as refused:
        find_tuned(str(tmp_path / "copy"), base=str(run.parent.parent / "models" / "base"))
    assert "Copy it again" in refused.value.fix


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_in_a_checkpoint_is_found_by_its_checksum(run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / _WEIGHTS
    flip_last_byte(file)
    for given, checkpoint in ((run, "latest"), (file.parent, None)):
        with pytest.raises(UserInputError, match="step-000002' is damaged") as refused:
            find_tuned(str(given), checkpoint=checkpoint)
        assert f"{_WEIGHTS}: changed" in refused.value.why and "step 1" in refused.value.fix
    assert find_tuned(str(run), checkpoint="1").step == 1


def test_a_flipped_byte_in_final_is_found_by_the_checksum_of_its_steps_checkpoint(run: Path) -> None:
    write_source(run / "final", FinalSource(2))
    assert find_tuned(str(run)).adapter == run / "final"
    flip_last_byte(run / "final" / _WEIGHTS)
    for given in (run, run / "final"):
        with pytest.raises(UserInputError, match="final' is damaged") as refused:
            find_tuned(str(given))
        assert f"{_WEIGHTS}: changed" in refused.value.why and "step 2" in refused.value.fix


def test_a_run_without_its_config_is_refused_and_its_adapter_elsewhere_is_a_plain_one(run: Path) -> None:
    """Taken for an adapter of no run, it would be asked in another format and dtype than it was trained in."""
    (run / "config.yaml").unlink()
    step = run / "checkpoints" / "step-000002"
    for given in (run, run / "final", step):
        with pytest.raises(UserInputError, match=r"The run 'one' has no config\.yaml") as refused:
            find_tuned(str(given))
        assert str(step if given == step else run / "final") in refused.value.fix
    (run / "run.json").rename(run / "events-rank0.jsonl")  # a run by its events alone
    with pytest.raises(UserInputError, match=r"has no config\.yaml"):
        find_tuned(str(run))
    copy = (run / "final").rename(run.parent.parent / "copy")
    base = str(run.parent.parent / "models" / "base")
    assert find_tuned(str(copy), base=base).run is None


def test_an_adapter_that_a_script_wrote_into_its_run_needs_no_config(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "run.json").write_text('{"kind": "script", "command": ["train.py"]}')
    assert find_tuned(str(run), base=str(run.parent.parent / "models" / "base")).config is None


def finish(run: Path) -> None:
    (run / "run.json").write_text('{"finished": true}')


def test_only_weights_that_are_there_are_named_as_others(run: Path) -> None:
    (run / "final").rename(run / "away")
    for checkpoint in (None, "best", "7"):
        with pytest.raises(UserInputError) as refused:
            find_tuned(str(run), checkpoint=checkpoint)
        assert refused.value.fix == "Give --checkpoint latest or a step (1, 2).", checkpoint
    CheckpointStore(run / "checkpoints", keep=None).record_eval(1, 0.5)
    (run / "away").rename(run / "final")
    with pytest.raises(UserInputError) as refused:
        find_tuned(str(run), checkpoint="7")
    assert refused.value.fix == "Give --checkpoint final, best, latest or a step (1, 2)."
    (run / "checkpoints").rename(run / "away")
    with pytest.raises(UserInputError, match="no such checkpoint") as refused:
        find_tuned(str(run), checkpoint="latest")
    assert "leave --checkpoint out to use final/" in refused.value.fix
    (run / "final").rename(run / "gone")
    with pytest.raises(UserInputError, match="no such checkpoint") as refused:
        find_tuned(str(run), checkpoint="latest")
    assert "neither checkpoints nor final/" in refused.value.fix


def test_a_finished_run_without_its_final_is_told_apart_from_one_in_progress(run: Path) -> None:
    (run / "final").rename(run / "away")
    with pytest.raises(UserInputError, match="has no final/ yet"):
        find_tuned(str(run))
    finish(run)
    with pytest.raises(UserInputError, match="is finished, and its final/ is not there any more") as refused:
        find_tuned(str(run))
    assert (
        f"shardtune train {run}/config.yaml --resume {run} " in refused.value.fix
        and "--checkpoint latest or a step (1, 2)" in refused.value.fix
    )
    (run / "checkpoints").rename(run / "nowhere")
    with pytest.raises(UserInputError, match="is not there any more") as refused:
        find_tuned(str(run))
    assert refused.value.fix == "Copy it back, or train again: the run saved no checkpoints."


@pytest.mark.parametrize(
    ("part", "step"),
    [("final", None), ("final/", None), ("checkpoints/step-000001", 1), ("step-000001", 1), ("step-2", 2)],
)
def test_what_lies_in_a_run_is_found_by_the_id_of_the_run(run: Path, part: str, step: int | None) -> None:
    for given, runs_dir in ((f"one/{part}", run.parent), (f"on/{part}", run.parent), (f"{run}/{part}", None)):
        tuned = find_tuned(given, runs_dir)
        assert (tuned.run, tuned.step) == (run, step), given


def test_what_does_not_lie_in_a_run_is_refused_by_its_id(run: Path) -> None:
    with pytest.raises(UserInputError, match="the run 'one' has no such checkpoint"):
        find_tuned("one/checkpoints/step-000007", run.parent)
    with pytest.raises(UserInputError, match="There is no run 'two/final'"):
        find_tuned("two/final", run.parent)
    with pytest.raises(UserInputError, match="--checkpoint has no effect"):
        find_tuned("one/final", run.parent, checkpoint="latest")
    (run / "final").rename(run / "away")
    with pytest.raises(UserInputError, match="has no final/"):
        find_tuned("one/final", run.parent)
