"""The rendered pods as processes of this machine: what the manifests say is what runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY, events

from shardtune.cluster.local_pod import replace_paths
from shardtune.cluster.local_pods import run_local_pods
from shardtune.cluster.manifests import Manifests
from shardtune.cluster.render import render
from shardtune.cluster.spec import make_job
from shardtune.config import load_config
from shardtune.errors import ShardtuneError, UserInputError

KINDS = ["trainjob", "pytorchjob", "jobset", "job"]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and the command ip"
)
LOOK = """
import json, os, pathlib, shutil, socket
def may_write(folder):
    try:
        pathlib.Path(folder, os.environ["HOSTNAME"]).touch()
    except OSError as error:
        return error.strerror
    return True
seen = {
    "env": dict(os.environ), "folder": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid(),
    "root": sorted(os.listdir("/")), "shm": shutil.disk_usage("/dev/shm").total,
    "models": may_write("/models"), "runs": may_write("/runs"), "interfaces": sorted(os.listdir("/sys/class/net")),
    "file": os.path.exists("/models/weights"), "cgroup": open("/proc/self/cgroup").read(),
    "master": socket.gethostbyname(os.environ.get("PET_MASTER_ADDR") or os.environ["MASTER_ADDR"]),
    "privileges": [line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))],
}
pathlib.Path("/runs", "seen-" + os.environ["HOSTNAME"]).write_text(json.dumps(seen))
print("looked around")
"""


def manifests_of(folder: Path, kind: str, overrides: list[str] | None = None, **cluster: object) -> Manifests:
    section = {
        "job_name": "ft", "nodes": 3, "working_dir": "/runs/here", "shared_memory": "32Mi",
        "volumes": [{"claim": "models", "path": "/models", "read_only": True}, {"claim": "runs", "path": "/runs"}],
        **cluster,
    }  # fmt: skip
    file = folder / "run.yaml"
    content = {"model": {"model_name_or_path": "/models/toy"}, "data": {"dataset_name_or_path": "/models/data"},
               "train": {"output_dir": "/runs"}, "cluster": section}  # fmt: skip
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return render(make_job(load_config(file, overrides or [], None, {}), file), kind)


def folders(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("models", "runs")}
    for folder in found.values():
        folder.mkdir()
    (found["models"] / "weights").touch()
    return found


def run(tmp_path: Path, manifests: Manifests, kind: str, **options: object) -> tuple[int, str]:
    out = io.StringIO()
    given = {"volumes": {}, **options}
    code = run_local_pods(manifests, kind, work_folder=tmp_path / "work", out=out, **given)  # type: ignore[arg-type]
    return code, out.getvalue()


def leftovers(tmp_path: Path) -> list[str]:
    """What should be gone: folders of the job, cgroups, processes of its pods."""
    found = [str(path) for path in (tmp_path / "work").glob("pods-*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/shardtune-{os.getpid()}-*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
            parent = int((process.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"pod_process.py" in command and parent == os.getpid():
            found.append(command.decode())
    return found


@pytest.mark.parametrize("namespaces", [pytest.param(True, marks=needs_root), False])
def test_packages_that_pythonpath_adds_are_part_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: bool
) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "only_there.py").write_text("print('added package')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "added"))
    manifests = manifests_of(tmp_path, "job", command=["python", "-c", "import only_there"], nodes=1)
    code, said = run(tmp_path, manifests, "job", volumes=folders(tmp_path), namespaces=namespaces)
    assert code == 0 and "[node 0] added package" in said, said


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_sees_what_its_manifest_says_and_nothing_else_of_this_machine(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "1")
    manifests = manifests_of(
        tmp_path, kind, command=["python", "-c", LOOK], env={"OWN": "value"}, memory="256Mi", cpu_limit="500m"
    )
    volumes = folders(tmp_path)
    code, said = run(tmp_path, manifests, kind, volumes=volumes, namespaces=True)
    assert code == 0, said
    seen = [json.loads(file.read_text()) for file in sorted(volumes["runs"].glob("seen-*"))]
    assert len(seen) == 3 and len({one["host"] for one in seen}) == 3
    for one in seen:
        env = one["env"]
        assert one["host"] == env["HOSTNAME"] != socket.gethostname() and one["pid"] == 1
        assert env["OWN"] == "value" and env["SHARDTUNE_NODES"] == "3" and "OF_THE_CALLER" not in env
        assert len(env["SHARDTUNE_SECRET"]) == 64 and env["SHARDTUNE_SECRET"] not in said
        assert one["folder"] == "/runs/here" and one["shm"] == 32 << 20
        assert one["models"] == "Read-only file system" and one["runs"] is True and one["file"]
        assert one["interfaces"] == ["eth0", "lo"] and one["master"] == "10.244.0.1"
        assert "home" not in one["root"] and "models" in one["root"]
        assert any("00000000a80425fb" in line for line in one["privileges"])
        assert any(line.split() == ["NoNewPrivs:", "1"] for line in one["privileges"])
        if "limits are not applied" not in said:
            assert f"shardtune-{os.getpid()}-" in one["cgroup"]
    assert len({one["env"]["SHARDTUNE_SECRET"] for one in seen}) == 1
    assert "[node 2] looked around" in said and "ended with exit code 0" in said
    assert leftovers(tmp_path) == []


@needs_root
def test_the_first_pod_that_fails_gives_the_exit_code_and_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.cluster.local_pods._OTHERS_SECONDS", 0.2)
    code = "import os, sys, time; os.environ['JOB_COMPLETION_INDEX'] == '1' and sys.exit(7); time.sleep(60)"
    manifests = manifests_of(tmp_path, "job", command=["python", "-c", code], grace_seconds=1)
    begin = time.monotonic()
    status, said = run(tmp_path, manifests, "job", namespaces=True)
    assert status == 7 and time.monotonic() - begin < 30
    # As process 1 without a handler they did not hear SIGTERM.
    assert "ft-1-xxxxx ended with exit code 7" in said and "ft-2-xxxxx ended with exit code 137" in said
    assert leftovers(tmp_path) == []


@needs_root
def test_a_pod_that_takes_more_memory_than_its_limit_is_killed(tmp_path: Path) -> None:
    code = "x = bytearray(300 << 20)"
    manifests = manifests_of(
        tmp_path, "job", command=["python", "-c", code], nodes=1, memory="64Mi", memory_limit="64Mi"
    )
    status, said = run(tmp_path, manifests, "job", namespaces=True)
    if "limits are not applied" in said:
        pytest.skip(said)
    assert status == 137


CALL = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from cluster.test_local_pods import manifests_of, run_local_pods
folder = Path({folder!r})
manifests = manifests_of(folder, "job", command=["python", "-u", "-c", {code!r}], grace_seconds=20)
sys.exit(run_local_pods(manifests, "job", volumes={{}}, work_folder=folder / "work", namespaces={namespaces}))
"""
WAIT = """
import signal, sys, time
def end(number, frame):
    print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
print("begun")
time.sleep(100)
"""


def started(tmp_path: Path, namespaces: bool) -> subprocess.Popen[str]:
    text = CALL.format(tests=str(REPOSITORY / "tests"), folder=str(tmp_path), code=WAIT, namespaces=namespaces)
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    begun = 0
    while begun < 3:
        line = process.stdout.readline()
        assert line, "it ended before its pods had begun"
        begun += "begun" in line
    return process


@pytest.mark.parametrize("namespaces", [pytest.param(True, marks=needs_root), False])
def test_a_stop_reaches_every_pod_as_a_sigterm_and_their_code_comes_back(tmp_path: Path, namespaces: bool) -> None:
    process = started(tmp_path, namespaces)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=40)
    assert process.returncode == 75 and said.count("saved") == 3


@needs_root
def test_nothing_of_the_pods_outlives_a_kill(tmp_path: Path) -> None:
    process = started(tmp_path, namespaces=True)
    mine = tmp_path.name.encode()

    def alive() -> list[bytes]:
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if b"HOSTNAME=ft-" in file.read_bytes() and mine in (file.parent / "mountinfo").read_bytes():
                    found.append((file.parent / "cmdline").read_bytes())
            except OSError:
                continue
        return found

    assert len(alive()) == 3
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []


def test_without_namespaces_paths_and_addresses_are_those_of_this_machine_and_it_is_said(tmp_path: Path) -> None:
    volumes = folders(tmp_path)
    code = (
        "import json, os, sys; open(sys.argv[1], 'a').write(json.dumps([os.getcwd(), os.environ['MASTER_ADDR'], "
        "os.environ['MASTER_PORT'], os.environ['OWN'], 'OF_THE_CALLER' in os.environ]) + '\\n')"
    )
    (volumes["runs"] / "here").mkdir()
    manifests = manifests_of(
        tmp_path, "pytorchjob", command=["python", "-c", code, "/runs/seen"], env={"OWN": "/models/toy:/modelsx"}
    )
    status, said = run(tmp_path, manifests, "pytorchjob", volumes=volumes, namespaces=False)
    assert status == 0, said
    seen = [json.loads(line) for line in (volumes["runs"] / "seen").read_text().splitlines()]
    assert len(seen) == 3 and len({one[2] for one in seen}) == 1
    for folder, address, port, own, of_the_caller in seen:
        assert folder == str(volumes["runs"] / "here") and address == "127.0.0.1" and port != "23456"
        assert own == f"{volumes['models']}/toy:/modelsx" and not of_the_caller
    assert leftovers(tmp_path) == []


def test_a_machine_that_cannot_keep_pods_apart_says_so_and_runs_plain_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    manifests = manifests_of(tmp_path, "job", command=["python", "-c", "print('here')"], nodes=1)
    status, said = run(tmp_path, manifests, "job")
    assert status == 0 and "plain processes" in said and "needs Linux and root" in said and "[node 0] here" in said
    with pytest.raises(UserInputError, match="cannot be kept apart"):
        run(tmp_path, manifests, "job", namespaces=True)


@pytest.mark.parametrize(
    ("cluster", "words", "fix"),
    [
        ({"gpus_per_node": 8}, "The pods ask for 24 GPUs together; this machine has 0.", "cluster.gpus_per_node=0"),
        ({"extended_resources": {"rdma/nic": "1"}}, "the resource rdma/nic", "cluster.extended_resources={}"),
        ({"secret_env": {"HF_TOKEN": "hub/token"}}, "'token' of the Secret 'hub'", "--secrets FOLDER"),
        (
            {"pod_overlay": {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/x"}}],
             "containers": [{"name": "trainer", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}]}}},
            "cannot provide the volume 'x' (hostPath)", "pod_overlay",
        ),
        (
            {"pod_overlay": {"spec": {"containers": [{"name": "side", "image": "x"}]}}},
            "more containers than the one that trains (side)", "pod_overlay",
        ),
    ],
)  # fmt: skip
def test_what_this_machine_cannot_give_a_pod_is_refused_with_what_to_change(
    tmp_path: Path, cluster: dict[str, object], words: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ShardtuneError) as caught:
        run(tmp_path, manifests_of(tmp_path, "job", **cluster), "job")
    assert words in caught.value.what and fix in caught.value.fix
    assert leftovers(tmp_path) == []


def test_gpus_are_divided_among_the_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    manifests = manifests_of(tmp_path, "job", command=["python", "-c", code], gpus_per_node=2, nodes=2)
    status, said = run(tmp_path, manifests, "job", namespaces=False)
    assert status == 0 and "[node 0] 4,5" in said and "[node 1] 6,7" in said


def test_secrets_come_from_files_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "secrets" / "hub").mkdir(parents=True)
    (tmp_path / "secrets" / "hub" / "token").write_text("hunter2")
    code = "import os; print(len(os.environ['HF_TOKEN']))"
    manifests = manifests_of(
        tmp_path, "job", command=["python", "-c", code], nodes=1, secret_env={"HF_TOKEN": "hub/token"}
    )
    status, said = run(tmp_path, manifests, "job", namespaces=False, secrets=tmp_path / "secrets")
    assert status == 0 and "[node 0] 7" in said and "hunter2" not in said


def test_a_folder_for_a_claim_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="for the claim 'runs' does not exist"):
        run(tmp_path, manifests_of(tmp_path, "job"), "job", volumes={"runs": tmp_path / "none"})


def test_only_whole_paths_are_replaced() -> None:
    places = {"/runs": Path("/a/runs"), "/runs/deep": Path("/b")}
    text = "x: /runs\ny: /runs/deep/z, '/runs/1' /runs-old /old/runs http://h/runs"
    assert replace_paths(text, places) == "x: /a/runs\ny: /b/z, '/a/runs/1' /runs-old /old/runs http://h/runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "namespaces"), [*[pytest.param(kind, True, marks=needs_root) for kind in KINDS], ("pytorchjob", False)]
)
def test_three_nodes_of_each_kind_train_to_the_end(
    tmp_path: Path, kind: str, namespaces: bool, toy_model: Path, toy_data: Path
) -> None:
    volumes = folders(tmp_path)
    shutil.copytree(toy_model, volumes["models"] / "toy")
    shutil.copytree(toy_data, volumes["models"] / "data")
    settings = ["train.max_steps=4", "parallel.device=cpu", "data.max_length=64", "train.per_device_train_batch_size=1",
                "lora.target_modules=[attention]"]  # fmt: skip
    manifests = manifests_of(
        tmp_path, kind, settings, memory="4Gi", init_doctor=kind == "job", env={"OMP_NUM_THREADS": "1"}
    )
    code, said = run(tmp_path, manifests, kind, volumes=volumes, namespaces=namespaces)
    assert code == 0, said
    assert (volumes["runs"] / "ft" / "final" / "adapter_model.safetensors").is_file()
    for node in range(3):
        assert f"node {node} of 3, master " in said
    # The doctor of each node, in its init container.
    assert said.count("verdict   ready") == (3 if kind == "job" else 0)
    (end,) = events(volumes["runs"] / "ft", "run_end")
    assert end["status"] == "done" and end["step"] == 4 and end["adapter"].endswith("/ft/final")
