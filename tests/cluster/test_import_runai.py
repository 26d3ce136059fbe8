"""A command of Run:ai becomes a section `cluster`, and every flag gets a verdict."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from described_jobs import RUN, executable, job_with
from rich.console import Console
from running import REPOSITORY, Command

from shardtune.cluster.import_command import local_script
from shardtune.cluster.import_job import import_job
from shardtune.cluster.import_report import Imported, ImportVerdict, as_yaml, verdict_table
from shardtune.cluster.import_runai import import_runai
from shardtune.cluster.import_values import read_duration, read_memory
from shardtune.cluster.render_job import render_job
from shardtune.cluster.render_runai import Generation, render_runai, runai_argv
from shardtune.cluster.runai_flags import NO_EFFECT, NOT_SUPPORTED, SWITCHES
from shardtune.cluster.spec import make_job
from shardtune.config import load_config
from shardtune.errors import UserInputError

SUBMIT = "runai training pytorch submit ft -p ml"


def imported(flags: str, *, form: str = SUBMIT, keep_uid: bool = False, script: Path | None = None) -> Imported:
    return import_runai(shlex.split(f"{form} {flags}"), local_script(script), keep_uid=keep_uid)


def verdict(found: Imported, key: str, value: str | None = None) -> ImportVerdict:
    matches = [one for one in found.verdicts if one.key == key and (value is None or value in one.value)]
    assert len(matches) == 1, (key, found.verdicts)
    return matches[0]


def test_the_flags_of_a_usual_command_become_settings() -> None:
    found = imported(
        "--image reg/i:1 --annotation k8s.v1.cni.cncf.io/networks=ml/ib0 --annotation team=nlp --large-shm --workers 2 "
        "--extended-resource openshift.io/mellanoxnics=1 --gpu-devices-request=8 --cpu-core-request 16 "
        "--cpu-memory-request 256Gi --cpu-memory-limit 256Gi --working-dir /work --environment-variable NCCL_DEBUG=WARN "
        "-e A=b=c --existing-pvc claimname=data,path=/data --existing-pvc claimname=runs,path=/runs --priority high "
        "--toleration operator=Exists,key=gpu,seconds=5 --backoff-limit 2 --termination-grace-period 5m --label a=b "
        "--auto-deletion-time-after-completion 1h30m --node-type h200 --node-pools a --node-pools b --capability SYS_NICE "
        "--env-secret HF_TOKEN=hub,key=token --image-pull-policy always"
    )
    assert found.section == {
        "target": "runai",
        "runai_project": "ml",
        "job_name": "ft",
        "image": "reg/i:1",
        "image_pull_policy": "Always",
        "networks": ["ml/ib0"],
        "annotations": {"team": "nlp", "kai.scheduler/node-pools": "a b"},
        "nodes": 3,
        "extended_resources": {"openshift.io/mellanoxnics": "1"},
        "rdma": "infiniband",
        "gpus_per_node": 8,
        "cpu": "16",
        "memory": "256Gi",
        "working_dir": "/work",
        "env": {"NCCL_DEBUG": "WARN", "A": "b=c"},
        "secret_env": {"HF_TOKEN": "hub/token"},
        "volumes": [{"claim": "data", "path": "/data"}, {"claim": "runs", "path": "/runs"}],
        "priority_class": "high",
        "tolerations": [{"operator": "Exists", "key": "gpu", "tolerationSeconds": 5}],
        "restarts": 2,
        "grace_seconds": 300,
        "labels": {"a": "b"},
        "keep_hours": 1.5,
        "node_selector": {"run.ai/type": "h200"},
        "capabilities": ["SYS_NICE"],
    }


def test_every_flag_gets_a_verdict_and_an_unknown_one_is_not_dropped() -> None:
    found = imported("--image i --frobnicate 3 --existing-pvcs claimname=a,path=/a --new-switch --workers 1")
    assert verdict(found, "--frobnicate").verdict == "not known"
    assert "Did you mean --existing-pvc?" in verdict(found, "--existing-pvcs").why
    assert verdict(found, "--new-switch").verdict == "not known"
    assert found.section["nodes"] == 2


DOCUMENTED = [
    "add-capability", "address", "allow-privilege-escalation", "annotation", "attach",
    "auto-deletion-time-after-completion", "backoff-limit", "capability", "clean-pod-policy", "command",
    "compute", "config-file", "config-path", "configmap-map-volume", "configmap-volume", "cpu",
    "cpu-core-limit", "cpu-core-request", "cpu-limit", "cpu-memory-limit", "cpu-memory-request",
    "create-home-dir", "datasource", "datavolume", "debug", "empty-dir-volume", "env-my-credentials",
    "env-pod-field-ref", "env-secret", "environment", "environment-variable", "exclude-node", "existing-pvc",
    "extended-resource", "external-url", "git-sync", "gpu", "gpu-devices-request", "gpu-memory",
    "gpu-memory-limit", "gpu-memory-request", "gpu-portion-limit", "gpu-portion-request", "gpu-request-type",
    "host-ipc", "host-network", "host-path", "image", "image-pull-my-credentials", "image-pull-policy",
    "job-name-prefix", "label", "large-shm", "loglevel", "master-args", "master-command",
    "master-cpu-core-limit", "master-cpu-core-request", "master-cpu-memory-limit", "master-cpu-memory-request",
    "master-environment", "master-environment-variable", "master-extended-resource", "master-gpu",
    "master-gpu-devices-request", "master-gpu-portion-limit", "master-gpu-portion-request", "master-no-pvcs",
    "master-restart-policy", "max-replicas", "memory", "memory-limit", "mig-profile", "min-replicas",
    "mount-propagation", "name", "name-prefix", "new-pvc", "nfs", "nfs-server", "no-master", "node-pools",
    "node-type", "pod-running-timeout", "port", "preemptibility", "preferred-pod-topology-key", "priority",
    "privileged", "project", "pvc", "pvc-exists", "pvc-new", "quiet", "required-pod-topology-key",
    "restart-policy", "run-as-gid", "run-as-non-root", "run-as-uid", "run-as-user", "s3", "seccomp-profile",
    "secret-volume", "service-type", "stdin", "supplemental-groups", "template", "termination-grace-period",
    "toleration", "ttl-after-finish", "tty", "user-group-source", "verbose", "volume", "wait-for-submit",
    "workers", "working-dir",
]  # fmt: skip


def test_every_flag_that_the_command_documents_is_known() -> None:
    for flag in (f"--{name}" for name in DOCUMENTED):
        value = "" if flag in SWITCHES else " value"
        found = imported(f"-i img {flag}{value}", form="runai training pytorch submit")
        assert "not known" not in [one.verdict for one in found.verdicts], flag


@pytest.mark.parametrize("flag", sorted({*NO_EFFECT, *NOT_SUPPORTED}))
def test_a_flag_without_a_setting_is_answered(flag: str) -> None:
    found = imported(f"--image i {flag}" + ("" if flag in SWITCHES else " value"))
    assert verdict(found, flag).verdict in ("no effect", "not supported")
    assert verdict(found, flag).why


def test_workers_do_not_count_the_master() -> None:
    assert "do not count the master" in verdict(imported("--workers 2"), "--workers").why
    assert imported("--workers 2 --no-master").section["nodes"] == 2
    assert "nodes" not in imported("").section


@pytest.mark.parametrize(
    ("written", "becomes"),
    [("3846", "3846Mi"), ("96", "96Gi"), ("4000000", "4000000Ki"), ("96GB", "96G"), ("96 gb", "96G"), ("96GiB", "96Gi"),
     ("96gi", "96Gi"), ("512kb", "512k"), ("103079215104", "96Gi")],
)  # fmt: skip
def test_memory_without_a_proper_unit_is_guessed_and_has_to_be_checked(written: str, becomes: str) -> None:
    found = imported(f"--cpu-memory-request '{written}'")
    assert found.section["memory"] == becomes
    assert verdict(found, "--cpu-memory-request").verdict == "changed"
    assert becomes in found.check["memory"]
    assert f"# CHECK: --cpu-memory-request was {written}" in as_yaml(found)


@pytest.mark.parametrize("written", ["256Gi", "96G", "1e12"])
def test_memory_with_a_unit_stays(written: str) -> None:
    assert read_memory(written) == (written, "")


def test_memory_that_means_nothing_is_not_written() -> None:
    found = imported("--cpu-memory-request lots")
    assert "memory" not in found.section
    assert verdict(found, "--cpu-memory-request").verdict == "not supported"


def test_too_little_memory_is_said() -> None:
    assert "too little" in verdict(imported("--cpu-memory-request 100M"), "--cpu-memory-request").why


def test_a_limit_above_the_request_is_kept_and_explained() -> None:
    found = imported("--cpu-memory-request 64Gi --cpu-memory-limit 96Gi")
    assert (found.section["memory"], found.section["memory_limit"]) == ("64Gi", "96Gi")
    assert "not reserved" in found.check["memory_limit"]
    assert imported("--cpu-memory-limit 96Gi").section["memory"] == "96Gi"


def test_a_fixed_uid_is_left_out_as_a_comment_unless_it_is_to_be_kept() -> None:
    found = imported("--run-as-uid 2000 --run-as-gid 2001")
    assert "run_as_uid" not in found.section
    assert "restricted-v2" in verdict(found, "--run-as-uid").why
    assert "  # run_as_uid: 2000\n" in as_yaml(found)
    kept = imported("--run-as-uid 2000 --run-as-gid 2001", keep_uid=True)
    assert (kept.section["run_as_uid"], kept.section["run_as_gid"]) == (2000, 2001)


def test_a_relative_path_becomes_absolute() -> None:
    found = imported("--existing-pvc claimname=data,path=data --working-dir ./work")
    assert found.section["volumes"] == [{"claim": "data", "path": "/data"}]
    assert found.section["working_dir"] == "/work"
    assert verdict(found, "--existing-pvc").verdict == verdict(found, "--working-dir").verdict == "changed"


# --- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["HF_TOKEN=value1234", "WANDB_API_KEY=value1234", "X=hf_value1234value1234value"])
def test_a_secret_in_plain_text_moves_to_a_secret_and_its_value_is_shown_nowhere(pair: str) -> None:
    name, value = pair.split("=")
    found = imported(f"-e {pair}")
    assert found.section["secret_env"] == {name: f"training-secrets/{name}"}
    assert verdict(found, "-e").verdict == "changed"
    assert found.steps == [
        f"printf '%s' \"${name}\" | "
        f"kubectl -n runai-ml create secret generic training-secrets --from-file={name}=/dev/stdin"
    ]
    assert value not in as_yaml(found) + repr(found)


def test_the_values_of_several_secrets_reach_kubectl_through_a_pipe(tmp_path: Path) -> None:
    found = imported("-e HF_TOKEN=value1234 -e WANDB_API_KEY=value5678")
    executable(tmp_path / "kubectl", f'#!/bin/sh\necho "$@" > {tmp_path}/args\ncat /dev/stdin > {tmp_path}/given\n')
    values = {"HF_TOKEN": "a %s 'b", "WANDB_API_KEY": "c=d"}
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **values}
    subprocess.run(["sh", "-c", found.steps[0]], env=environ, check=True)
    assert (tmp_path / "given").read_text() == "HF_TOKEN=a %s 'b\nWANDB_API_KEY=c=d\n"
    assert "--from-env-file=/dev/stdin" in (tmp_path / "args").read_text()
    assert "c=d" not in (tmp_path / "args").read_text()


def test_secrets_in_other_flags_and_in_the_command_are_not_shown() -> None:
    found = imported(
        "--s3 bucket=b,key=AAAA1,secret=AAAA2,url=u,target=/t --git-sync source=x,password=AAAA3 --unknown token=AAAA4 "
        "--command -- bash -c 'export WANDB_API_KEY=AAAA5 && pip install git+https://AAAA6@github.com/a/b && torchrun t.py --token AAAA7'"
    )
    assert "AAAA" not in as_yaml(found) + repr(found)
    assert found.section["secret_env"] == {"WANDB_API_KEY": "training-secrets/WANDB_API_KEY"}


def test_a_secret_that_was_one_already_stays_one() -> None:
    found = imported("-e HF_TOKEN=SECRET:hub,token")
    assert found.section["secret_env"] == {"HF_TOKEN": "hub/token"}
    assert found.steps == []


@pytest.mark.parametrize(
    ("pair", "name", "why"),
    [
        ("CUDA_VISIBLE_DEVICES=0", "changed", "hides GPUs"),
        ("NCCL_TIMEOUT=1800", "no effect", "step_timeout_minutes"),
        ("NCCL_IB_CUDA_SUPPORT=1", "no effect", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_IB_QPS_PER_CONNECTION=1", "no effect", "default"),
        ("MASTER_ADDR=10.0.0.1", "no effect", "set it in each pod"),
        ("PET_NNODES=3", "no effect", "set it in each pod"),
        ("ACCELERATE_USE_FSDP=1", "no effect", "accelerate_config"),
        ("TOKENIZERS_PARALLELISM=false", "no effect", "default"),
    ],
)
def test_a_variable_that_does_harm_or_nothing_is_left_out_with_the_reason(pair: str, name: str, why: str) -> None:
    found = imported(f"-e {pair}")
    assert "env" not in found.section
    assert verdict(found, "-e").verdict == name
    assert why in verdict(found, "-e").why


def test_a_variable_that_is_often_misunderstood_stays_with_an_explanation() -> None:
    found = imported("-e NCCL_SOCKET_IFNAME=ib0 -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert found.section["env"] == {"NCCL_SOCKET_IFNAME": "ib0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "not InfiniBand" in verdict(found, "-e", "IFNAME").why


def test_the_same_flag_means_a_variable_in_one_release_and_an_asset_in_the_next() -> None:
    assert imported("--environment A=b").section["env"] == {"A": "b"}
    assert verdict(imported("--environment my-asset"), "--environment").verdict == "not supported"


# --- other spellings ------------------------------------------------------------------------------------------------


def test_the_first_generation_of_the_command_is_read() -> None:
    found = imported(
        "--name ft --workers=2 -g 4 -i img --cpu 8 --memory 64G --pvc data:/data:ro --pvc-exists claimname=b,path=/b "
        "--ttl-after-finish 2h --add-capability CAP_IPC_LOCK -p=ml",
        form="runai submit-dist pytorch",
    )
    assert found.section == {
        "target": "runai", "nodes": 3, "gpus_per_node": 4, "image": "img", "cpu": "8", "memory": "64G", "keep_hours": 2.0,
        "volumes": [{"claim": "data", "path": "/data", "read_only": True}, {"claim": "b", "path": "/b"}],
        "capabilities": ["IPC_LOCK"], "runai_project": "ml", "job_name": "ft",
    }  # fmt: skip


@pytest.mark.parametrize("flags", ["-g8 -i img", "-g=8 -i=img", "--gpu-devices-request=8 --image=img", "-i img -g 8"])
def test_a_value_may_be_written_in_every_way_that_the_command_takes(flags: str) -> None:
    found = imported(flags)
    assert (found.section["gpus_per_node"], found.section["image"]) == (8, "img")


def test_a_fraction_of_a_gpu_is_not_supported() -> None:
    found = imported("-g 0.5")
    assert "gpus_per_node" not in found.section
    assert "whole GPUs" in verdict(found, "-g").why


def test_one_pod_stays_one_pod() -> None:
    found = imported("-i img --workers 3", form="runai training standard submit ft")
    assert "nodes" not in found.section
    assert "set cluster.runai_project" in found.steps[0]


def test_a_name_that_is_too_long_is_left_out() -> None:
    found = import_runai(["runai", "submit", "x" * 50], local_script(None))
    assert "job_name" not in found.section
    assert verdict(found, "NAME").verdict == "changed"


def test_a_master_that_differs_from_the_workers_is_said() -> None:
    found = imported("-g 8 --master-gpu-devices-request 8 --master-extended-resource a/b=1 --master-command x")
    assert verdict(found, "--master-gpu-devices-request").verdict == "honoured"
    assert verdict(found, "--master-extended-resource").verdict == "changed"


def test_what_no_setting_covers_is_kept_in_the_overlay() -> None:
    found = imported(
        "--host-ipc --nfs server=s,path=/x,mountpath=/x --env-pod-field-ref P=metadata.name --host-path path=/a,mount=/a,readwrite"
    )
    spec = found.section["pod_overlay"]["spec"]
    assert spec["hostIPC"] is True
    assert [one["name"] for one in spec["volumes"]] == ["x", "a"]
    (container,) = spec["containers"]
    assert container["name"] == "trainer"
    assert container["volumeMounts"] == [
        {"name": "x", "mountPath": "/x", "readOnly": True}, {"name": "a", "mountPath": "/a"},
    ]  # fmt: skip
    assert container["env"][0]["name"] == "P"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--host-ipc", ""), ("--nfs", "server=s,path=/x,mountpath=/x"), ("--existing-pvc", "claimname=a,path=/a,ro")],
)
def test_what_the_command_itself_cannot_say_later_is_said_now(tmp_path: Path, flag: str, value: str) -> None:
    found = imported(f"-i img {flag} {value}")
    assert "runai_submit: cli refuses it" in verdict(found, flag).why
    file = tmp_path / "run.yaml"
    file.write_text(f"{yaml.safe_dump(RUN)}{as_yaml(found)}", encoding="utf-8")
    with pytest.raises(UserInputError, match="cannot express"):
        runai_argv(make_job(load_config(file), file), "cli")


def test_a_priority_that_does_not_exist_is_not_written() -> None:
    found = imported("--priority train")
    assert "priority_class" not in found.section
    assert verdict(found, "--priority").verdict == "not supported"
    assert "very-low" in verdict(found, "--priority").why


def test_whole_quantities_are_written_as_numbers_and_load_as_before(tmp_path: Path) -> None:
    found = imported("-i img --cpu-core-request 16 --cpu-core-limit 0.5 --extended-resource a/b=1 -e A=1 --label x=2")
    text = as_yaml(found)
    assert "  cpu: 16\n" in text and "    a/b: 1\n" in text
    assert "    A: '1'\n" in text and "    x: '2'\n" in text, "these have to be texts"
    file = tmp_path / "run.yaml"
    file.write_text(f"{yaml.safe_dump(RUN)}{text}", encoding="utf-8")
    cluster = make_job(load_config(file), file).settings
    assert (cluster.cpu, cluster.cpu_limit, cluster.extended_resources) == ("16", "0.5", {"a/b": "1"})


@pytest.mark.parametrize("words", [["kubectl", "apply"], ["runai", "list"], ["runai"], []])
def test_what_submits_nothing_is_refused(words: list[str]) -> None:
    with pytest.raises(UserInputError):
        import_runai(words, local_script(None))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("30s", 30.0), ("1h30m", 5400.0), ("5x", None), ("", None)]
)
def test_durations_are_those_of_go(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


# --- the command of the container -----------------------------------------------------------------------------------


def test_a_shell_command_that_installs_and_launches_becomes_the_image_and_our_command() -> None:
    found = imported(
        "--command -- bash -lc 'pip install -q trl peft==0.9 && accelerate launch --config_file fsdp.yaml train.py --lr 1'"
    )
    command = verdict(found, "--command --")
    assert command.verdict == "translated"
    assert "accelerate launch" in command.why and "train.py" in command.why and "docs/from-trl.md" in command.why
    assert "parallel.accelerate_config: fsdp.yaml" in command.why
    assert verdict(found, "pip install").value == "trl, peft==0.9"
    assert "command" not in found.section


SCRIPT = """\
#!/bin/bash
set -euo pipefail   # strict
export NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0
MASTER=$(hostname)
export GREETING="a # b" PORT=${PORT:-29500}
python -m pip install --upgrade \\
    bitsandbytes
cat > ds.json <<EOF
rm everything
EOF
exec torchrun --nproc_per_node=8 train.py --epochs 3
rsync out /somewhere
"""


def test_a_launcher_script_that_is_here_is_read(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(SCRIPT, encoding="utf-8")
    for found in (imported(f"--command -- bash {file}"), imported("--command -- /app/other.sh", script=file)):
        assert found.section["env"] == {"NCCL_DEBUG": "INFO", "GREETING": "a # b", "PORT": "29500"}
        assert verdict(found, "export", "CUDA_VISIBLE").verdict == "changed"
        assert verdict(found, "pip install").value == "bitsandbytes"
        assert "`torchrun` with train.py" in verdict(found, "--command --").why
        assert verdict(found, "also runs").value == "rsync"


def test_a_script_that_is_not_here_is_asked_for() -> None:
    found = imported("--command -- bash /app/launch.sh")
    assert "--script FILE" in verdict(found, "script").why


def test_a_command_without_a_launcher_is_said() -> None:
    assert "No training launcher" in verdict(imported("--command -- sleep infinity"), "--command --").why


def test_broken_quotes_in_a_command_are_an_answer_not_a_traceback() -> None:
    found = import_runai([*SUBMIT.split(), "--command", "--", "bash", "-c", "echo 'oops"], local_script(None))
    assert "cannot be read as shell" in verdict(found, "--command --").why


# --- there and back -------------------------------------------------------------------------------------------------

EVERYTHING = {
    "runai_project": "ml", "image": "reg/i@sha256:1", "nodes": 3, "gpus_per_node": 8, "cpu": "16", "cpu_limit": "32",
    "memory": "256Gi", "memory_limit": "300Gi", "extended_resources": {"rdma/hca": "1"}, "rdma": "infiniband", "networks": ["ml/ib0"],
    "annotations": {"a": "b", "kai.scheduler/node-pools": "x y"}, "labels": {"team": "nlp"},
    "volumes": [{"claim": "runs", "path": "/runs"}], "env": {"A": "x y", "NCCL_DEBUG": "WARN"},
    "secret_env": {"HF_TOKEN": "hub/token"}, "run_as_uid": 5, "run_as_gid": 6, "capabilities": ["IPC_LOCK"],
    "node_selector": {"run.ai/type": "h"}, "tolerations": [{"operator": "Exists", "key": "k"}], "topology": "rack",
    "restarts": 2, "keep_hours": 2.0, "working_dir": "/runs", "image_pull_policy": "Never",
}  # fmt: skip


@pytest.mark.parametrize("generation", ["cli", "cli-2.20"])
def test_a_command_that_was_rendered_is_imported_and_renders_the_same_command(
    tmp_path: Path, generation: Generation
) -> None:
    argv = runai_argv(job_with(tmp_path, **EVERYTHING), generation)
    found = import_runai(argv, local_script(None), keep_uid=True)
    assert not [one for one in found.verdicts if one.verdict in ("not known", "not supported", "changed")]
    file = tmp_path / "again.yaml"
    file.write_text(f"{yaml.safe_dump(RUN)}{as_yaml(found)}", encoding="utf-8")
    again = runai_argv(make_job(load_config(file), file), generation)
    assert sorted(again) == sorted(argv)


def test_an_imported_section_loads_and_renders_as_a_manifest_with_its_overlay(tmp_path: Path) -> None:
    found = imported(
        "-i img --workers 1 -g 8 --cpu-memory-request 64Gi --host-ipc --nfs server=s,path=/x,mountpath=/x --existing-pvc claimname=r,path=r"
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"{yaml.safe_dump(RUN)}{as_yaml(found)}", encoding="utf-8")
    pod = render_runai(make_job(load_config(file), file), render_job).templates["node"]["spec"]
    assert pod["hostIPC"] is True
    (container,) = pod["containers"]
    assert {"name": "pvc-r", "mountPath": "/r"} in container["volumeMounts"]
    assert {"name": "x", "mountPath": "/x", "readOnly": True} in container["volumeMounts"]
    assert "x" in [volume["name"] for volume in pod["volumes"]]


# --- the command line -----------------------------------------------------------------------------------------------


def test_the_section_goes_to_standard_output_and_the_verdicts_to_standard_error(shardtune: Command) -> None:
    done = shardtune(
        "cluster",
        "import",
        "--",
        *shlex.split(f"{SUBMIT} -i img -e HF_TOKEN=value1234 --command -- bash -c 'torchrun t.py'"),
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["cluster"]["image"] == "img"
    assert "torchrun" in done.stderr and "kubectl -n runai-ml create secret" in done.stderr
    assert "value1234" not in done.stdout + done.stderr


def test_a_shell_script_with_the_command_is_read_and_a_file_is_not_overwritten(
    shardtune: Command, tmp_path: Path
) -> None:
    file, out = tmp_path / "submit.sh", tmp_path / "cluster.yaml"
    file.write_text(f"#!/bin/bash\n# old\n{SUBMIT} \\\n  -i img \\\n  --workers 2\n", encoding="utf-8")
    done = shardtune("cluster", "import", str(file), "--output", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(out.read_text(encoding="utf-8"))["cluster"]["nodes"] == 3
    assert {one["key"] for one in json.loads(done.stdout)["verdicts"]} == {"-p", "-i", "--workers", "NAME"}
    again = shardtune("cluster", "import", str(file), "--output", str(out))
    assert again.returncode == 2 and "exists" in again.stderr


def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "cluster-import.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    submit, launch = (text for kind, text in blocks if kind == "bash")
    (tmp_path / "submit.sh").write_text(submit, encoding="utf-8")
    (tmp_path / "launch.sh").write_text(launch, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = import_job(["submit.sh"])
    assert as_yaml(found) == dict(blocks)["yaml"]
    with io.StringIO() as text:
        Console(file=text, width=100).print(verdict_table(found.verdicts, "today's job"))
        lines = [line.rstrip() for line in text.getvalue().splitlines()] + [f"first: {step}" for step in found.steps]
    assert "\n".join(lines).split() == dict(blocks)["text"].split()
