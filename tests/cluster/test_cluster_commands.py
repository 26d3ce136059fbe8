"""`shardtune cluster lint` and `scc` as users call them, and the names that lint knows."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.linting import GOOD, cluster, job_of, overlay, trainer
from running import Command

from shardtune.cluster.lint_subject import Subject
from shardtune.cluster.nccl_names import only_in, releases, renew, unknown_names
from shardtune.cluster.openshift import render_scc
from shardtune.cluster.pod import merge_overlay
from shardtune.cluster.render_job import render_job
from shardtune.errors import UserInputError


def config(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(merge_overlay(GOOD, changes)))
    return file


def test_errors_exit_with_1_and_are_printed_with_their_rule(shardtune: Command, tmp_path: Path) -> None:
    done = shardtune("cluster", "lint", config(tmp_path, cluster(memory=3846)), "--to", "job")
    assert done.returncode == 1, done.stderr
    assert "error     cluster.memory: 3846 has no unit, and means 3,846 bytes [memory-unit]" in done.stdout
    assert "→ Write 3846Mi or 3846Gi." in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict   1 error, 0 warnings, ")


def test_json_has_every_finding_and_warnings_exit_with_0(shardtune: Command, tmp_path: Path) -> None:
    done = shardtune("cluster", "lint", config(tmp_path, cluster(target="job", cpu=None)), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["version"], found["job"], found["target"], found["ok"]) == (1, "tune", "job", True)
    assert {"rule": "missing-cpu", "severity": "warning", "path": "cluster.cpu"}.items() <= found["findings"][0].items()


def test_what_submit_refuses_lint_reports(shardtune: Command, tmp_path: Path) -> None:
    file = config(tmp_path, trainer(command="bash"))
    done = shardtune("cluster", "lint", file, "--to", "jobset", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["ok"] and [one["rule"] for one in found["findings"] if one["severity"] == "error"] == ["schema"]
    sent = shardtune("submit", file, "--to", "jobset", "--dry-run", "client")
    assert sent.returncode == 2 and "containers[0].command: must be a list [schema]" in sent.stdout
    assert "notice" not in sent.stdout


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, [], "Where does the job go?"),
        ({}, ["--to", "kubernetes"], "kubernetes"),
        (cluster(gang_scheduling="volcano"), ["--to", "job"], "cannot ask for gang scheduling"),
        (cluster(pod_overlay={"spec": {"containers": {"a": 1}}}), ["--to", "job"], "pod_overlay.spec.containers is not a list"),
    ],
)  # fmt: skip
def test_invalid_input_exits_with_2(
    shardtune: Command, tmp_path: Path, changes: dict[str, Any], options: list[str], words: str
) -> None:
    done = shardtune("cluster", "lint", config(tmp_path, changes), *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_the_plan_is_compared_where_the_model_is_here(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    changes = {
        "model": {"model_name_or_path": str(toy_model)},
        "data": {"dataset_name_or_path": str(toy_data)},
        "cluster": {"gpu": "H200", "target": "job", "memory": "4Gi"},
    }
    file = config(tmp_path, changes)
    done = shardtune("cluster", "lint", file, "--json")
    found = {one["rule"]: one for one in json.loads(done.stdout)["findings"]}
    assert "host-memory" in found and "memory-not-checked" not in found, done.stdout
    assert "by the plan" in found["host-memory"]["what"]
    unknown = shardtune("cluster", "lint", file, "-o", "cluster.gpu=H9000")
    assert unknown.returncode == 2 and "H9000" in unknown.stderr


def test_no_scc_is_needed_where_restricted_v2_admits_the_job(shardtune: Command, tmp_path: Path) -> None:
    done = shardtune("cluster", "scc", config(tmp_path, {}), "--to", "job")
    assert done.returncode == 0 and "restricted-v2 admits this job" in done.stdout


def test_the_scc_is_printed_for_an_administrator_as_yaml(shardtune: Command, tmp_path: Path) -> None:
    changes = cluster(run_as_uid=2000, capabilities=["IPC_LOCK"], namespace="ml", service_account="trainer")
    done = shardtune("cluster", "scc", config(tmp_path, changes), "--to", "job")
    assert done.returncode == 0, done.stderr
    assert "# IPC_LOCK does nothing for a user other than root" in done.stdout
    scc, role, account, binding = yaml.safe_load_all(done.stdout)
    assert scc["runAsUser"] == {"type": "MustRunAs", "uid": 2000}
    assert scc["allowedCapabilities"] == ["IPC_LOCK", "NET_BIND_SERVICE"]
    assert role["rules"][0]["resourceNames"] == [scc["metadata"]["name"]] == [binding["roleRef"]["name"]]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "trainer", "namespace": "ml"}]
    assert account["metadata"] | {"labels": None} == {"name": "trainer", "namespace": "ml", "labels": None}


IDENTITY = {"namespace": "ml", "service_account": "trainer"}


def scc_of(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    job = job_of(folder, merge_overlay(changes, {"cluster": IDENTITY}))
    return render_scc(job, Subject(job, "job", render_job(job)).pods[0])[0]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        (cluster(fs_group=3000), {"fsGroup": {"type": "MustRunAs", "ranges": [{"min": 3000, "max": 3000}]}}),
        (overlay(hostNetwork=True), {"allowHostNetwork": True, "allowHostPorts": True}),
        (overlay(hostIPC=True), {"allowHostIPC": True}),
        (trainer(ports=[{"containerPort": 1, "hostPort": 1}]), {"allowHostPorts": True}),
        (trainer(securityContext={"allowPrivilegeEscalation": True}), {"allowPrivilegeEscalation": True}),
    ],
)  # fmt: skip
def test_an_scc_allows_what_the_job_asks_for_and_no_more(
    tmp_path: Path, changes: dict[str, Any], allowed: dict[str, Any]
) -> None:
    base = scc_of(tmp_path, cluster(capabilities=["IPC_LOCK"]))
    found = scc_of(tmp_path, merge_overlay(changes, cluster(capabilities=["IPC_LOCK"])))
    assert {key: value for key, value in found.items() if base.get(key) != value} == allowed


def test_a_host_path_needs_two_fields_of_the_scc(tmp_path: Path) -> None:
    found = scc_of(tmp_path, overlay(volumes=[{"name": "d", "hostPath": {"path": "/dev/infiniband"}}]))
    assert found["allowHostDirVolumePlugin"] is True and "hostPath" in found["volumes"]


@pytest.mark.parametrize("missing", sorted(IDENTITY))
def test_an_scc_is_for_a_service_account_of_a_namespace(tmp_path: Path, missing: str) -> None:
    job = job_of(tmp_path, cluster(run_as_uid=2000, **{**IDENTITY, missing: None}))
    with pytest.raises(UserInputError, match=f"cluster.{missing} is not set"):
        render_scc(job, Subject(job, "job", render_job(job)).pods[0])


def test_the_table_of_names_knows_what_exists_in_which_release() -> None:
    assert releases("nccl")[0] == "2.27.7" and len(releases("nccl")) >= 3
    assert unknown_names(["NCCL_DEBUG", "NCCL_IB_HCA", "TORCH_NCCL_BLOCKING_WAIT", "PATH", "NCCL_VERSION"]) == {}
    assert set(unknown_names(["NCCL_TIMEOUT", "NCCL_IB_CUDA_SUPPORT", "NCCL_TREE_THRESHOLD", "NCCL_CHECKS_DISABLE"])) == {
        "NCCL_TIMEOUT", "NCCL_IB_CUDA_SUPPORT", "NCCL_TREE_THRESHOLD", "NCCL_CHECKS_DISABLE",
    }  # fmt: skip
    assert "NCCL 2.31.2" in only_in("NCCL_RUN_DIAGNOSTICS") and only_in("NCCL_DEBUG") == []


def test_the_table_is_made_from_the_libraries_in_wheels(tmp_path: Path) -> None:
    def wheel(name: str, files: dict[str, bytes]) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        return tmp_path / name

    wheels = [
        wheel("nvidia_nccl_cu13-2.9.1-py3-none-any.whl", {"nvidia/nccl/lib/libnccl.so.2": b"\0NCCL_OLD\0NCCL_BOTH\0"}),
        wheel("nvidia_nccl_cu13-2.10.0-py3-none-any.whl", {"nvidia/nccl/lib/libnccl.so.2": b"\0NCCL_BOTH\0Set NCCL_NO \0"}),
        wheel("torch-2.13.0-cp311-any.whl", {"torch/lib/libtorch_cuda.so": b"\0TORCH_A\0NCCL_PRINTED\0", "torch/x.py": b"os.environ['TORCH_B']"}),
    ]  # fmt: skip
    assert json.loads(renew(wheels)) == {
        "nccl": {"releases": ["2.9.1", "2.10.0"], "in_all": ["NCCL_BOTH"], "in_some": {"NCCL_OLD": ["2.9.1"]}},
        "torch": {"releases": ["2.13.0"], "in_all": ["TORCH_A", "TORCH_B"], "in_some": {}},
    }
    with pytest.raises(ValueError, match="neither nvidia-nccl nor torch"):
        renew([tmp_path / "numpy-2.0.whl"])
