"""Every setting has a verdict, and a change is told as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.checkpoint.changes import DIGESTS, VERDICTS, changes, identity, kept_settings
from shardtune.config import load_config
from shardtune.config.schema import RunConfig


def config(**sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {"model": {"model_name_or_path": "m"}, "data": {"dataset_name_or_path": "d"}}
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return RunConfig.model_validate(values)


def settings(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return kept_settings(config(**sections))


def test_every_setting_of_the_schema_has_a_verdict_and_every_verdict_a_setting() -> None:
    fields = {f"{section}.{name}" for section, values in settings().items() for name in values}
    assert set(VERDICTS) == fields


def test_what_is_not_free_says_what_it_means() -> None:
    assert all(verdict.meaning for verdict in VERDICTS.values() if verdict.kind in ("notice", "refused"))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("train", "logging_steps", 3), ("train", "save_steps", 7), ("train", "eval_steps", 7), ("train", "report_to", "wandb"),
     ("train", "debug_freq", 1), ("train", "gradient_checkpointing", False), ("train", "resume", "latest"),
     ("parallel", "nproc", 3), ("train", "gradient_accumulation_steps", 4), ("cluster", "env", {"A": "b"})],
)  # fmt: skip
def test_harmless_changes_are_not_mentioned_and_stay_the_same_run(section: str, name: str, value: object) -> None:
    changed = settings(**{section: {name: value}})
    assert changes(settings(), changed) == []
    assert identity(config(**{section: {name: value}})) == identity(config())


@pytest.mark.parametrize(
    ("section", "name", "value", "kind"),
    [("train", "learning_rate", 0.5, "notice"), ("train", "weight_decay", 0.5, "notice"), ("lora", "lora_dropout", 0.5, "notice"),
     ("lora", "r", 3, "refused"), ("lora", "target_modules", ["q_proj"], "refused"), ("train", "seed", 7, "refused"),
     ("model", "model_name_or_path", "n", "refused"), ("data", "dataset_name_or_path", "e", "refused"),
     ("data", "max_length", 7, "refused"), ("train", "packing", False, "refused"), ("train", "optim", "sgd", "refused")],
)  # fmt: skip
def test_changes_that_matter_are_told_with_old_and_new_and_make_another_run(
    section: str, name: str, value: Any, kind: str
) -> None:
    old, new = settings(), settings(**{section: {name: value}})
    (change,) = changes(old, new)
    assert (change.path, change.verdict.kind) == (f"{section}.{name}", kind)
    assert (change.old, change.new) == (old[section][name], value)
    assert str(change).startswith(f"{section}.{name}: ") and " → " in str(change)
    assert identity(config()) != identity(config(**{section: {name: value}}))


@pytest.mark.parametrize(("name", "value"), [("max_steps", 99), ("num_train_epochs", 9.0)])
def test_a_longer_run_is_the_same_run_and_is_told(name: str, value: float) -> None:
    longer = settings(train={name: value})
    assert identity(config(train={name: value})) == identity(config())
    assert "learning rate jumps" in str(changes(settings(), longer)[0])


def test_a_folder_written_another_way_is_the_same_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    absolute = settings(model={"model_name_or_path": str(tmp_path / "m")})
    assert changes(settings(model={"model_name_or_path": "m"}), absolute) == []


def test_a_setting_that_the_table_does_not_know_is_refused() -> None:
    old, new = settings(), settings()
    old["train"]["invented"], new["train"]["invented"] = 1, 2
    assert changes(old, new)[0].verdict.kind == "refused"
    del old["train"]["invented"]  # written by a version that did not have it
    assert changes(old, new) == []


def from_environment(folder: Path, **environ: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: m}\ndata: {dataset_name_or_path: '${DATA}', cache_dir: '${CACHE:-c}'}\n"
        "lora:\n  r: ${R:-8}\n  target_modules: [q_proj, '${SECOND:-v_proj}']\n"
    )
    return load_config(path, environ={"DATA": "rows", **environ}).config


def test_another_value_behind_the_same_reference_is_another_run_and_neither_is_written(tmp_path: Path) -> None:
    old, new = from_environment(tmp_path), from_environment(tmp_path, DATA="others", R="9", SECOND="k_proj")
    told = [str(change).partition(" (")[0] for change in changes(kept_settings(old), kept_settings(new))]
    assert told == [
        "lora.r: ${R:-8} resolves to another value",
        'lora.target_modules: ["q_proj", "${SECOND:-v_proj}"] resolves to another value',
        "data.dataset_name_or_path: ${DATA} resolves to another value",
    ]
    assert identity(old) != identity(new)
    assert "others" not in json.dumps(kept_settings(new)) and "k_proj" not in json.dumps(kept_settings(new))


def test_the_same_value_is_the_same_run_however_it_is_written(tmp_path: Path) -> None:
    literal = config(data={"dataset_name_or_path": "rows"}, lora={"r": 8, "target_modules": ["q_proj", "v_proj"]})
    reference = from_environment(tmp_path)
    assert identity(literal) == identity(reference)
    for old, new in ((literal, reference), (reference, literal), (reference, from_environment(tmp_path))):
        assert changes(kept_settings(old), kept_settings(new)) == []
    (change,) = changes(
        kept_settings(reference),
        kept_settings(
            config(data={"dataset_name_or_path": "x"}, lora={"r": 8, "target_modules": ["q_proj", "v_proj"]})
        ),
    )
    assert str(change).startswith('data.dataset_name_or_path: "${DATA}" → "x"')


def test_only_settings_that_change_numbers_leave_a_digest(tmp_path: Path) -> None:
    kept = kept_settings(from_environment(tmp_path, CACHE="/hidden/place"))
    assert set(kept[DIGESTS]) == {"data.dataset_name_or_path", "lora.r", "lora.target_modules"}
    assert kept["data"]["cache_dir"] == "${CACHE:-c}" and "hidden" not in json.dumps(kept)
    assert DIGESTS not in settings()
