"""The model card says what was done, and nothing of the machine it was done on."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from export.exporting import Quiet, export
from tuned_toys import tuned_toy

from shardtune.checkpoint.final import weights_sha256
from shardtune.config.schema import ModelSection
from shardtune.export.base_name import hub_name, licence
from shardtune.export.model_card import _evaluations, _source, without_paths
from shardtune.export.request import CardParts, ExportRequest, Verification
from shardtune.export.run import export_model
from shardtune.inference.source import find_tuned

TOKEN = "hf_" + "a1B2c3D4e5F6" * 3


def front_matter(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def run_folder(folder: Path) -> Path:
    """What a run leaves, with things in it that are nobody's business."""
    tuned_toy("dense", folder)
    run = folder / "20260101-000000-abcd"
    run.mkdir()
    (folder / "adapter").rename(run / "final")
    config = {
        "model": {"model_name_or_path": str(folder / "base"), "torch_dtype": "float32", "base_precision": "bf16"},
        "data": {
            "dataset_name_or_path": [
                "/home/somebody/secret-project/rows.jsonl",
                f"https://me:{TOKEN}@host.example/secret-project/more.jsonl?token={TOKEN}",
            ],
            "val_split": "validation",
        },
        "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "train": {"learning_rate": 0.003, "output_dir": "/home/somebody/runs"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "final" / "source.json").write_text(json.dumps({"step": 4, "eval_loss": 2.25}))
    (run / "run.json").write_text(json.dumps({"version": 1, "started": 1.0}))
    environment = {"host": socket.gethostname(), "packages": {"torch": "2.13.0"}, "python": "3.11"}
    events = [
        {"event": "run_start", "time": 10.0, "rank": 0, "world_size": 2, "environment": environment,
         "command": "shardtune train /home/somebody/c.yaml"},
        {"event": "data", "time": 11.0, "format": {"name": "text"}, "train": {"rows": 50, "tokens": 646}},
        {"event": "step", "time": 12.0, "step": 1, "loss": 4.0, "learning_rate": 0.1},
        {"event": "step", "time": 13.0, "step": 8, "loss": 2.5, "learning_rate": 0.1},
        {"event": "eval", "time": 14.0, "step": 4, "loss": 2.25},
        {"event": "eval", "time": 15.0, "step": 8, "loss": 2.5},
        {"event": "run_end", "time": 16.0, "step": 8},
    ]  # fmt: skip
    (run / "events-rank0.jsonl").write_text("".join(json.dumps({"version": 2, **event}) + "\n" for event in events))
    (run / "evaluations").mkdir()
    estimate = {"value": 0.712, "low": 0.58, "high": 0.81}
    metrics = [{"title": "exact match", "kind": "share", "base": {"value": 0.0}, "tuned": estimate}]
    data = {"path": "/home/somebody/test.jsonl", "split": "test", "rows": 60}
    result = {
        "schema": 1, "time": 20.0, "checkpoint": "final", "step": 4, "adapter_sha256": weights_sha256(run / "final"),
        "base_model": str(folder / "base"), "data": data, "metrics": metrics,
    }  # fmt: skip
    (run / "evaluations" / "test.json").write_text(json.dumps(result))
    return run


def evaluation(run: Path, **changes: object) -> None:
    """The run's evaluation with these changes; None: without the key, as older versions wrote it."""
    file = run / "evaluations" / "test.json"
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "is_listed"),
    [
        ({}, True),
        ({"adapter_sha256": "0" * 64}, False),  # final/ was another checkpoint's then
        ({"base_model": "another/base"}, False),
        ({"adapter_sha256": None}, True),
        ({"adapter_sha256": None, "step": 3}, False),
        ({"adapter_sha256": None, "step": None}, False),
    ],
)
def test_only_evaluations_of_the_exported_weights_on_their_base_are_listed(
    changes: dict[str, object], is_listed: bool, tmp_path: Path
) -> None:
    run = run_folder(tmp_path)
    evaluation(run, **changes)
    assert ("exact match" in _evaluations(find_tuned(str(run)))) is is_listed


def test_it_has_data_settings_results_hardware_versions_and_use(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# The base\n")
    (tmp_path / "base" / "LICENSE.txt").write_text("the licence")
    (tmp_path / "base" / "USE_POLICY.md").write_text("the policy")
    export_model(ExportRequest(find_tuned(str(run)), "merged", tmp_path / "out", base_name="owner/base"), Quiet())
    card = (tmp_path / "out" / "README.md").read_text()
    front = front_matter(card)
    assert front["base_model"] == "owner/base" and front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers" and "lora" in front["tags"]  # type: ignore[operator]
    for expected in (
        "source: rows.jsonl, more.jsonl", "training: 50 rows, 646 tokens", "format: text", "learning_rate: 0.003", "r: 4",
        "training loss 4.0000 → 2.5000 in 8 steps", "best validation loss 2.2500 at step 4", "torch 2.13.0", "the weights of step 4, validation loss 2.2500",
        "| exact match | 0.0 % | 71.2 % [58.0, 81.0] |", "test.jsonl, 60 rows, step 4;",
        'AutoModelForCausalLM.from_pretrained("out"', "Verified:", "2 processes",
    ):  # fmt: skip
        assert expected in card, expected
    for private in ("/home", "somebody/", str(tmp_path), socket.gethostname(), TOKEN, "secret-project"):
        assert private not in card.replace("hostname", ""), private
    assert "A LoRA fine-tune of owner/base, made with shardtune." in card
    assert "torch_dtype: float32" in card and "base_precision" not in card  # bf16 there means "not FP8"
    kept = {name: (tmp_path / "out" / name).read_text() for name in ("LICENSE.txt", "USE_POLICY.md", "README-base.md")}
    assert kept["LICENSE.txt"] == "the licence" and kept["README-base.md"].endswith("# The base\n")


def test_an_adapter_of_no_run_says_that_its_training_is_not_known(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    export(tmp_path / "adapter", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "how it was trained is not known" in card and str(tmp_path) not in card
    assert "A LoRA fine-tune of the model in the local folder 'base', made with shardtune." in card
    assert "base_model" not in front_matter(card)  # a folder's name is no name on the Hub


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("in /data/models/mine: 3 files", "in mine: 3 files"),
        ("~/models/mine and ~you/x", "mine and x"),
        ("file:///home/me/rows.jsonl", "rows.jsonl"),
        ("https://host/a/b and org/model, 3 / 4, s/step", "https://host/a/b and org/model, 3 / 4, s/step"),
        ("'/a b/c d/e.txt'", "'e.txt'"),
    ],
)
def test_paths_lose_their_folders(given: str, left: str) -> None:
    assert without_paths(given) == left


def test_a_warning_is_on_the_card(tmp_path: Path) -> None:
    from shardtune.export.model_card import write_card

    tuned_toy("dense", tmp_path)
    request = ExportRequest(find_tuned(str(tmp_path / "adapter")), "merged", tmp_path / "out")
    (tmp_path / "folder").mkdir()
    parts = CardParts("transformers", "load {folder}")
    verified = Verification("weights", "all is well")
    write_card(request, tmp_path / "base", parts, verified, ["Beware of /root/x."], tmp_path / "folder")
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "- Beware of x." in card and "load out" in card and "Verified: all is well." in card


def test_another_base_than_that_of_training_is_in_the_result_and_on_the_card(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    tuned = find_tuned(str(tmp_path / "adapter"), base=str(tmp_path / "copy"))
    done = export_model(ExportRequest(tuned, "adapter", tmp_path / "out"), Quiet())
    assert any("Trained on" in warning and str(tmp_path / "copy") in warning for warning in done.warnings)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Trained on 'base', using 'copy'" in card and str(tmp_path) not in card


def test_the_licence_and_name_of_a_base_are_read_as_they_are_written(tmp_path: Path) -> None:
    section = ModelSection(model_name_or_path="org/model")
    assert hub_name(section, tmp_path) == "org/model"
    local = section.model_copy(update={"model_name_or_path": str(tmp_path)})
    assert hub_name(local, tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "org/saved"}))
    assert hub_name(local, tmp_path) == "org/saved"
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "/scratch/saved"}))
    assert hub_name(local, tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: [not, text]\nlicense_name: mine\n---\n")
    assert licence(tmp_path) == {"license_name": "mine"}
    (tmp_path / "README.md").write_text("---\n: broken: [\n---\n")
    assert licence(tmp_path) == {}


@pytest.mark.parametrize(
    ("given", "shown"),
    [("org/data", "org/data"), ("customer/rows.jsonl", "rows.jsonl"), ("customer/rows.json.gz", "rows.json.gz"), ("a/b/c", "c")],
)  # fmt: skip
def test_of_data_the_last_part_of_a_path_is_shown_and_a_name_on_the_hub_as_it_is(given: str, shown: str) -> None:
    assert _source(given) == shown
