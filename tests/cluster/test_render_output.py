"""What people get: YAML to read, a folder for kustomize, and nowhere the nodes' secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from sample_jobs import KINDS, rich_job, small_job

from shardtune.cluster.render import PLACEHOLDER, render, to_yaml, write_kustomize
from shardtune.errors import UserInputError
from shardtune.launch.network import SECRET_VARIABLE, read_network
from shardtune.launch.process_role import Node


@pytest.mark.parametrize("kind", KINDS)
def test_the_yaml_says_what_was_rendered_in_the_order_of_creation(kind: str) -> None:
    manifests = render(rich_job(3), kind)
    documents = list(yaml.safe_load_all(to_yaml(manifests)))
    for document in documents:
        if document["kind"] == "Secret":
            document["stringData"] = {"secret": ""}
    assert documents == list(manifests)
    assert documents[-1]["kind"].lower() == kind


def test_the_yaml_is_for_people() -> None:
    text = to_yaml(render(rich_job(3), "pytorchjob"))
    assert "  run.yaml: |\n    model:\n      model_name_or_path: /models/m  # ‘m’\n" in text
    assert "&id" not in text and "{" not in text
    assert text.startswith(
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: rich-config\n  namespace: ml\n  labels:\n"
    )


def test_the_yaml_holds_a_placeholder_that_no_run_starts_with() -> None:
    manifests = render(small_job(2), "jobset")
    (secret,) = [one for one in manifests if one["kind"] == "Secret"]
    secret["stringData"]["secret"] = "the-real-value-of-the-secret"
    text = to_yaml(manifests)
    assert "the-real-value" not in text
    assert f"  secret: {PLACEHOLDER}\n" in text and "openssl rand -hex 32" in text
    with pytest.raises(UserInputError, match="at least 16 are needed"):
        read_network({SECRET_VARIABLE: PLACEHOLDER}, Node(nnodes=2, master_addr="ft-node-0-0.ft"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kustomize_folder_names_every_file_it_holds(kind: str, tmp_path: Path) -> None:
    manifests = render(rich_job(3), kind)
    written = write_kustomize(manifests, tmp_path / "job")
    assert {file.name for file in written} == {file.name for file in (tmp_path / "job").iterdir()}
    kustomization = yaml.safe_load((tmp_path / "job" / "kustomization.yaml").read_text(encoding="utf-8"))
    documents = [yaml.safe_load((tmp_path / "job" / name).read_text()) for name in kustomization["resources"]]
    assert documents == [one for one in manifests if one["kind"] not in ("Secret", "ConfigMap")]
    (config,), (secret,) = kustomization["configMapGenerator"], kustomization["secretGenerator"]
    assert (config["name"], config["files"]) == ("rich-config", ["run.yaml"])
    assert (secret["name"], secret["envs"], secret["namespace"]) == ("rich-nodes", ["secret.env"], "ml")
    assert config["options"]["disableNameSuffixHash"] and secret["options"]["disableNameSuffixHash"]
    # By name, TrainJob would come before its runtime; for all others ConfigMap and Secret come first by default.
    assert kustomization.get("sortOptions") == ({"order": "fifo"} if kind == "trainjob" else None)


def test_another_kind_in_the_same_folder_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    write_kustomize(render(small_job(2), "job"), tmp_path)
    (tmp_path / "mine.yaml").touch()
    write_kustomize(render(small_job(2), "jobset"), tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"jobset.yaml", "run.yaml", "kustomization.yaml", "secret.env", ".gitignore", "mine.yaml"}


def test_the_secret_of_a_kustomize_folder_is_its_owners_alone_and_not_for_git(tmp_path: Path) -> None:
    values = []
    for _ in range(2):  # also when it is written again
        write_kustomize(render(small_job(2), "job"), tmp_path)
        file = tmp_path / "secret.env"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        values.append(file.read_text(encoding="utf-8"))
        assert len(values[-1].removeprefix("secret=").strip()) == 64
    assert values[0] != values[1]
    assert "secret.env" in (tmp_path / ".gitignore").read_text(encoding="utf-8").split()
    others = [file.read_text(encoding="utf-8") for file in tmp_path.iterdir() if file.name != "secret.env"]
    assert not any(values[1].removeprefix("secret=").strip() in text for text in others)


def test_one_node_needs_no_secret(tmp_path: Path) -> None:
    write_kustomize(render(small_job(1), "job"), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"job.yaml", "run.yaml", "kustomization.yaml"}


def test_a_kustomization_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\n", encoding="utf-8")
    with pytest.raises(UserInputError, match="shardtune did not write"):
        write_kustomize(render(small_job(2), "job"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kustomization.yaml"]


def test_a_config_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine\n", encoding="utf-8")
    with pytest.raises(UserInputError, match=r"already holds run\.yaml"):
        write_kustomize(render(small_job(2), "job"), tmp_path)
    assert (tmp_path / "run.yaml").read_text(encoding="utf-8") == "mine\n"
