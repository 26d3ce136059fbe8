"""A run's files come back from the volume, whole, and nowhere else than where they should."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from cluster_objects import pod, template, workload

from shardtune.cluster import pull as pull_module
from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ClusterError
from shardtune.cluster.pull import pull, unpack
from shardtune.errors import UserInputError

Kube = Callable[..., Any]
WEIGHTS = bytes(range(256)) * 700  # larger than a frame, and no text


@pytest.fixture
def run_folder(server: ApiServer) -> Path:
    folder = server.root / "runs" / "ft"
    for name, data in (
        ("run.json", b"{}"), ("events-rank0.jsonl", b"{}\n"), ("final/adapter_model.safetensors", WEIGHTS),
        ("checkpoints/step-10/model.bin", b"x" * 1000),
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def running(server: ApiServer, run_folder: Path) -> None:
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0))


@pytest.fixture
def ended(server: ApiServer, run_folder: Path) -> None:
    """The pod is gone: a helper has to be started, which the server runs at once."""
    server.put("jobs", workload("Job", ("Complete", "done"), nodes=1))

    def start(made: dict[str, Any]) -> None:
        made["status"] = {"phase": "Running", "containerStatuses": [{"name": "pull", "state": {"running": {}}}]}

    server.on_create["pods"] = start


def test_reports_and_the_adapter_come_without_checkpoints(running: None, cluster: Cluster, tmp_path: Path) -> None:
    found = pull(cluster, "ft", tmp_path / "here", everything=False, force=False)
    folder = tmp_path / "here" / "ft"
    assert found.folder == folder
    assert (folder / "final" / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "checkpoints").exists()
    assert (found.files, found.bytes) == (3, 2 + 3 + len(WEIGHTS))


def test_all_brings_checkpoints_too(running: None, kube: Kube, tmp_path: Path) -> None:
    done = kube("pull", "ft", "--to", tmp_path / "here", "--all")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "ft" / "checkpoints" / "step-10" / "model.bin").stat().st_size == 1000
    assert "shardtune report" in done.stdout


def test_files_that_are_here_are_kept_unless_forced(running: None, kube: Kube, tmp_path: Path) -> None:
    mine = tmp_path / "here" / "ft" / "run.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    done = kube("pull", "ft", "--to", tmp_path / "here")
    assert mine.read_text(encoding="utf-8") == "mine"
    assert "run.json" in done.stderr
    kube("pull", "ft", "--to", tmp_path / "here", "--force")
    assert mine.read_text(encoding="utf-8") == "{}"


def test_without_a_running_pod_a_helper_reads_the_volume_and_is_deleted(
    ended: None, server: ApiServer, kube: Kube, tmp_path: Path
) -> None:
    helpers: list[dict[str, Any]] = []
    start = server.on_create["pods"]
    server.on_create["pods"] = lambda made: (helpers.append(made), start(made))
    done = kube("pull", "ft", "--to", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "ft" / "run.json").exists()
    assert server.of("pods") == []
    (helper,) = helpers
    (container,) = helper["spec"]["containers"]
    assert container["image"] == "registry.example/shardtune:1"
    assert container["volumeMounts"] == [{"name": "pvc-runs", "mountPath": "/runs", "readOnly": True}]
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert helper["spec"]["activeDeadlineSeconds"]


def test_the_helper_is_deleted_when_it_is_interrupted(
    ended: None, server: ApiServer, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        assert len(server.of("pods")) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull(cluster, "ft", tmp_path / "here", everything=False, force=False)
    assert server.of("pods") == []


def test_a_helper_that_does_not_start_is_explained_and_deleted(
    ended: None, server: ApiServer, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "_START_SECONDS", 0.1)
    message = '0/2 nodes are available: persistentvolumeclaim "runs" not found'
    stuck = pod(0, "Pending", unschedulable=message)["status"]
    server.on_create["pods"] = lambda made: made.update(status=stuck)
    with pytest.raises(Exception, match="'runs' does not exist"):
        pull(cluster, "ft", tmp_path / "here", everything=False, force=False)
    assert server.of("pods") == []


def test_a_trainjobs_helper_takes_image_and_volumes_from_its_runtime(
    ended: None, server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    server.objects.clear()
    job = workload("TrainJob", ("Complete", "done"))
    job["spec"]["trainer"]["image"] = "registry.example/other:2"
    server.put("trainjobs", job)
    inner = template()
    inner["spec"]["containers"][0]["name"] = "node"
    jobs = [{"name": "node", "template": {"spec": {"template": inner}}}]
    server.put(
        "trainingruntimes",
        {"metadata": {"name": "ft-runtime"}, "spec": {"template": {"spec": {"replicatedJobs": jobs}}}},
    )
    images: list[str] = []
    start = server.on_create["pods"]
    server.on_create["pods"] = lambda made: (images.append(made["spec"]["containers"][0]["image"]), start(made))
    assert pull(cluster, "ft", tmp_path / "here", everything=False, force=False).files == 3
    assert images == ["registry.example/other:2"]


def test_a_run_that_has_written_nothing_says_so(running: None, run_folder: Path, kube: Kube) -> None:
    shutil.rmtree(run_folder)
    done = kube("pull", "ft")
    assert done.returncode == 2
    assert "There is no folder '/runs/ft' on the volume." in done.stderr


def test_a_job_without_volumes_has_nothing_to_pull(server: ApiServer, kube: Kube) -> None:
    job = workload("Job", ("Complete", "done"))
    job["spec"]["template"]["spec"]["volumes"] = []
    server.put("jobs", job)
    assert "mounts no PersistentVolumeClaim" in kube("pull", "ft").stderr


def test_no_permission_to_run_commands_is_said(running: None, server: ApiServer, kube: Kube) -> None:
    server.forbidden.add(("create", "pods/exec"))
    done = kube("pull", "ft")
    assert done.returncode == 1
    assert "no permission to create pods/exec" in done.stderr


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> Any:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("name", ["ft/../../evil", "/etc/evil", "other/evil", "../evil"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="refused"):
        unpack(archive((tarfile.TarInfo(name), b"x")), "ft", tmp_path / "a" / "ft", force=True)
    assert not list(tmp_path.rglob("evil"))


def test_links_are_left_out_and_named(tmp_path: Path) -> None:
    link = tarfile.TarInfo("ft/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    found = unpack(archive((link, b""), (tarfile.TarInfo("ft/file"), b"x")), "ft", tmp_path / "ft", force=False)
    assert found.skipped == ("link",)
    assert not (tmp_path / "ft" / "link").is_symlink()


def test_nothing_is_written_through_a_link_that_is_here(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "ft").mkdir()
    (tmp_path / "ft" / "final").symlink_to(outside)
    with pytest.raises(UserInputError, match="is a link"):
        unpack(archive((tarfile.TarInfo("ft/final/x"), b"x")), "ft", tmp_path / "ft", force=True)
    assert list(outside.iterdir()) == []


def test_a_stream_that_ends_early_leaves_no_half_file(tmp_path: Path) -> None:
    whole = archive((tarfile.TarInfo("ft/a"), b"a"), (tarfile.TarInfo("ft/big"), b"b" * 100_000)).getvalue()
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(whole[:50_000]), "ft", tmp_path / "ft", force=False)
    assert sorted(path.name for path in (tmp_path / "ft").iterdir()) == ["a"]


PAGE = "<!DOCTYPE html><html><head><style>h1 {color: red}</style><title>502 Bad Gateway</title></head><h1>Sorry</h1>"


@pytest.mark.parametrize(
    "answer",
    [
        PAGE.encode(),
        json.dumps({"status": "Failure", "reason": "InternalError", "message": f"unable to upgrade: {PAGE}"}).encode(),
    ],
)
def test_a_pod_that_takes_no_command_is_said_without_the_page_that_came_back(
    answer: bytes, running: None, server: ApiServer, kube: Kube
) -> None:
    server.exec_status = answer
    done = kube("pull", "ft")
    assert done.returncode == 1
    assert "No command can be run in pod ft-0" in done.stderr
    assert "502 Bad Gateway" in done.stderr
    assert "create and get pods/exec" in done.stderr
    assert "<" not in done.stderr and "color" not in done.stderr and "Sorry" not in done.stderr


def test_an_image_without_tar_is_not_mistaken_for_a_refusal(running: None, server: ApiServer, kube: Kube) -> None:
    message = 'OCI runtime exec failed: unable to start: exec: "tar": executable file not found in $PATH'
    server.exec_status = json.dumps({"status": "Failure", "reason": "InternalError", "message": message}).encode()
    assert "The image has no `tar`." in kube("pull", "ft").stderr
