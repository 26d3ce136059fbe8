"""A job reaches the cluster whole, or not at all."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, Refusal

from shardtune.cluster.api import Cluster
from shardtune.cluster.manifests import Manifests
from shardtune.cluster.render_job import render_job
from shardtune.cluster.render_trainjob import render_trainjob
from shardtune.cluster.shell_script import shell_script
from shardtune.cluster.spec import make_job
from shardtune.cluster.submit import check_name_free, dry_run, submit
from shardtune.config import load_config
from shardtune.errors import ShardtuneError, UserInputError

OURS = ("configmaps", "secrets", "services", "jobs", "pods")
FORBIDDEN = Refusal(
    403, "Forbidden", 'secrets is forbidden: User "dev" cannot create resource "secrets" in API group ""'
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    settings: dict[str, Any] = {
        "model": {"model_name_or_path": "/models/none"},
        "data": {"dataset_name_or_path": "/data/rows.jsonl"},
        "train": {"output_dir": "/runs"},
        "cluster": {
            "target": "job", "nodes": 2, "gpus_per_node": 4, "gpu": "H200", "cpu": "8", "memory": "256Gi",
            "image": "registry.example/shardtune@sha256:" + 64 * "0",
            "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "models", "path": "/models", "read_only": True},
                        {"claim": "data", "path": "/data", "read_only": True}],
        },
    }  # fmt: skip
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


@pytest.fixture
def manifests(config: Path) -> Manifests:
    return render_job(make_job(load_config(config, ["cluster.job_name=ft"]), config))


def test_everything_is_created_and_belongs_to_the_job(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    made = submit(cluster, manifests)
    assert server.names(*OURS) == ["configmaps/ft-config", "jobs/ft", "secrets/ft-nodes", "services/ft"]
    for plural in ("configmaps", "secrets", "services"):
        (owner,) = server.of(plural)[0]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "ft", made["metadata"]["uid"])
        assert owner["blockOwnerDeletion"] is False  # OpenShift asks for more permissions otherwise
    assert server.of("jobs")[0]["metadata"]["annotations"]["shardtune.dev/run-folder"] == "/runs/ft"


def test_the_nodes_secret_is_made_anew_each_time_and_long(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    values = set()
    for _ in range(2):
        submit(cluster, manifests)
        values.add(server.of("secrets")[0]["stringData"]["secret"])
        server.objects.clear()
    assert len(values) == 2
    assert all(len(value) == 64 for value in values)
    assert manifests.support[1]["stringData"] == {"secret": ""}  # what is printed and written has none


def test_a_dry_run_tries_every_object_and_the_pod_and_creates_nothing(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    assert list(dry_run(cluster, manifests)) == []
    tried = [(method, path) for method, path in server.requests if "dryRun=All" in path]
    assert len(tried) == len(server.requests) == 2 * 4 + 1
    assert any("/pods?" in path for _, path in tried)
    assert server.objects == {}


def test_a_pod_that_the_kind_accepts_but_a_pod_may_not_be_is_refused(cluster: Cluster, manifests: Manifests) -> None:
    manifests.templates["node"]["spec"]["volumes"].pop()
    with pytest.raises(ShardtuneError, match=r"volumeMounts\[\d\]\.name"):
        list(dry_run(cluster, manifests))


def test_who_may_create_jobs_but_no_pods_gets_a_notice(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    server.forbidden.add(("create", "pods"))
    (notice,) = dry_run(cluster, manifests)
    assert "not tried as Pods" in notice


def test_a_trainjob_whose_runtime_must_exist_first_is_no_error(
    server: ApiServer, cluster: Cluster, config: Path
) -> None:
    words = "trainingRuntime must be created before the TrainJob is created"
    server.refuse_dry["trainjobs"] = Refusal(403, "Forbidden", f'admission webhook "x" denied the request: {words}')
    job = make_job(load_config(config, ["cluster.job_name=ft"]), config)
    (notice,) = dry_run(cluster, render_trainjob(job))
    assert "TrainingRuntime has to exist first" in notice
    server.refuse_dry["trainjobs"] = Refusal(403, "Forbidden", 'admission webhook "x" denied the request: otherwise')
    with pytest.raises(ShardtuneError, match="otherwise"):
        list(dry_run(cluster, render_trainjob(job)))


def test_a_trainjob_waits_until_trainers_cache_has_its_runtime(
    server: ApiServer, cluster: Cluster, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = 'admission webhook "x" denied the request: trainingRuntime must be created before the TrainJob is created'
    server.refuse["create", "trainjobs"] = Refusal(403, "Forbidden", words)
    threading.Timer(0.5, server.refuse.clear).start()
    manifests = render_trainjob(make_job(load_config(config, ["cluster.job_name=ft"]), config))
    submit(cluster, manifests)
    made = server.names("trainjobs", "trainingruntimes", "secrets")
    assert {"trainjobs/ft", "trainingruntimes/ft"} <= set(made)
    monkeypatch.setattr("shardtune.cluster.submit._CACHE_SECONDS", 0.0)
    server.refuse["create", "trainjobs"] = Refusal(403, "Forbidden", words)
    other = render_trainjob(make_job(load_config(config, ["cluster.job_name=other"]), config))
    with pytest.raises(ShardtuneError, match="admission webhook"):
        submit(cluster, other)
    assert server.names("trainjobs", "trainingruntimes", "secrets") == made


@pytest.mark.parametrize("plural", ["configmaps", "secrets", "services", "jobs"])
def test_a_failure_at_any_object_leaves_nothing_behind(
    plural: str, server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    server.refuse["create", plural] = Refusal(403, "Forbidden", "admission says no")
    with pytest.raises(ShardtuneError) as caught:
        submit(cluster, manifests)
    assert server.objects == {}
    before = ["configmaps", "secrets", "services", "jobs"].index(plural)
    assert ("deleted again" in str(caught.value)) == (before > 0)
    assert "admission says no" in caught.value.why


def test_a_failure_when_owners_are_set_takes_the_job_with_it(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    server.refuse["patch", "secrets"] = Refusal(403, "Forbidden", "no")
    with pytest.raises(ShardtuneError, match="deleted again: Job ft, Service ft, Secret ft-nodes, ConfigMap ft-config"):
        submit(cluster, manifests)
    assert server.objects == {}


def test_an_object_whose_confirmation_was_lost_is_deleted_too(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    server.lose_answer_of.add("jobs")
    with pytest.raises(ShardtuneError, match="Job ft"):
        submit(cluster, manifests)
    assert server.objects == {}


def test_what_cannot_be_deleted_is_named(server: ApiServer, cluster: Cluster, manifests: Manifests) -> None:
    server.refuse["create", "jobs"] = Refusal(403, "Forbidden", "no")
    server.forbidden.add(("delete", "secrets"))
    with pytest.raises(ShardtuneError, match=r"LEFT BEHIND.*: Secret ft-nodes"):
        submit(cluster, manifests)
    assert server.names(*OURS) == ["secrets/ft-nodes"]


def test_the_secret_is_in_no_message(server: ApiServer, cluster: Cluster, manifests: Manifests) -> None:
    def echo(made: dict[str, Any]) -> None:
        raise Refusal(422, "Invalid", f'Secret is invalid: data: Invalid value: "{made["stringData"]["secret"]}"')

    server.on_create["secrets"] = echo
    with pytest.raises(ShardtuneError, match='Invalid value: "…"'):
        submit(cluster, manifests)


def test_somebody_elses_object_of_the_same_name_is_neither_taken_over_nor_deleted(
    server: ApiServer, cluster: Cluster, manifests: Manifests
) -> None:
    theirs = server.put("services", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "ft"}, "spec": {}})
    with pytest.raises(UserInputError, match="Service 'ft' exists already"):
        check_name_free(cluster, manifests)
    with pytest.raises(ShardtuneError, match="exists already"):
        submit(cluster, manifests)
    assert server.of("services") == [theirs]
    assert server.names(*OURS) == ["services/ft"]


def test_submitting_twice_is_refused_with_the_state_of_the_first(
    server: ApiServer, kube: Callable[..., Any], config: Path
) -> None:
    first = kube("submit", config, "--name", "ft")
    assert first.returncode == 0, first.stderr
    assert "shardtune logs -f ft" in first.stdout
    stored = json.dumps(server.of("secrets"))
    second = kube("submit", config, "--name", "ft")
    assert second.returncode == 2
    assert "A job 'ft' exists already in namespace 'ml': Job, pending." in second.stderr
    assert "shardtune cancel ft" in second.stderr
    assert json.dumps(server.of("secrets")) == stored


def test_a_dry_run_on_this_machine_contacts_nothing(server: ApiServer, kube: Callable[..., Any], config: Path) -> None:
    done = kube("submit", config, "--dry-run", "client", env={"KUBECONFIG": "/nowhere"})
    assert done.returncode == 0, done.stderr
    assert "memory was not checked: The model folder '/models/none' does not exist." in done.stdout
    assert server.requests == []


def test_a_dry_run_on_the_server_prints_its_words_and_creates_nothing(
    server: ApiServer, kube: Callable[..., Any], config: Path
) -> None:
    server.warnings = ["would violate PodSecurity"]
    done = kube("submit", config, "--dry-run", "server", "--json")
    assert done.returncode == 0, done.stderr
    assert "the server says: would violate PodSecurity" in done.stderr
    assert json.loads(done.stdout)["dry_run"] == "server"
    assert server.objects == {}


def test_no_permission_for_secrets_says_so_and_leaves_nothing(
    server: ApiServer, kube: Callable[..., Any], config: Path
) -> None:
    server.forbidden |= {("create", "secrets"), ("get", "secrets")}
    done = kube("submit", config)
    assert done.returncode == 1
    assert "You have no permission to create secrets in namespace 'ml'." in done.stderr
    assert server.objects == {}


def test_without_a_target_it_asks_for_one(kube: Callable[..., Any], config: Path) -> None:
    done = kube("submit", config, "-o", "cluster.target=null")
    assert done.returncode == 2
    assert "--to" in done.stderr


def test_the_manifests_can_be_printed_or_written_instead(
    server: ApiServer, kube: Callable[..., Any], config: Path, tmp_path: Path
) -> None:
    printed = kube("submit", config, "--output", "yaml")
    assert [one["kind"] for one in yaml.safe_load_all(printed.stdout)] == ["ConfigMap", "Secret", "Service", "Job"]
    kube("submit", config, "--output", f"{tmp_path}/out/")
    assert (tmp_path / "out" / "kustomization.yaml").exists()
    assert "neither `yaml` nor a folder" in kube("submit", config, "--output", "nowhere").stderr
    assert server.requests == []


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_every_kind_is_submitted_and_its_operator_is_named_where_it_is_missing(
    kind: str, server: ApiServer, kube: Callable[..., Any], config: Path
) -> None:
    done = kube("submit", config, "--to", kind, "--name", "ft")
    assert done.returncode == 0, done.stderr
    assert f"{kind}s/ft" in server.names(f"{kind}s")
    server.objects.clear()
    server.crds.clear()
    done = kube("submit", config, "--to", kind)
    assert done.returncode == 1
    assert "is not installed" in done.stderr
    assert server.objects == {}


def test_an_error_of_lint_ends_before_anything_is_contacted(
    server: ApiServer, kube: Callable[..., Any], config: Path
) -> None:
    done = kube("submit", config, "-o", "cluster.memory=3846")
    assert done.returncode == 2
    assert "cluster.memory" in done.stdout
    assert server.requests == []


def fake_command(folder: Path, name: str, script: str) -> str:
    """A command of that name; returns the PATH that finds it."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def runai_config(tmp_path: Path) -> Path:
    """For Run:ai's command, which cannot mount a volume read-only."""
    file = tmp_path / "runai.yaml"
    settings = {
        "model": {"model_name_or_path": "/models/none"}, "data": {"dataset_name_or_path": "/models/rows.jsonl"},
        "train": {"output_dir": "/runs"},
        "cluster": {
            "target": "runai", "runai_project": "lab", "runai_submit": "cli", "nodes": 2, "gpus_per_node": 4, "cpu": "8",
            "memory": "256Gi", "image": "registry.example/shardtune@sha256:" + 64 * "0",
            "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "models", "path": "/models"}],
        },
    }  # fmt: skip
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


def test_a_runai_command_that_fails_leaves_nothing_beside_it(
    server: ApiServer, kube: Callable[..., Any], runai_config: Path, tmp_path: Path
) -> None:
    server.namespaces.add("runai-lab")
    path = fake_command(
        tmp_path, "runai", 'case "$1" in whoami) echo me ;; *) echo "project is over quota" >&2; exit 1 ;; esac'
    )
    done = kube("submit", runai_config, "--name", "ft", env={"PATH": path})
    assert done.returncode == 1
    assert "project is over quota" in done.stderr
    assert "deleted again: Secret ft-nodes, ConfigMap ft-config" in done.stderr
    assert server.objects == {}


def test_a_runai_command_that_succeeds_says_what_stays(
    server: ApiServer, kube: Callable[..., Any], runai_config: Path, tmp_path: Path
) -> None:
    server.namespaces.add("runai-lab")
    path = fake_command(tmp_path, "runai", "echo workload submitted")
    done = kube("submit", runai_config, "--name", "ft", env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert "configmap/ft-config secret/ft-nodes" in done.stdout
    assert server.names("configmaps", "secrets") == ["configmaps/ft-config", "secrets/ft-nodes"]


def test_without_the_command_runai_nothing_is_created(
    server: ApiServer, kube: Callable[..., Any], runai_config: Path, tmp_path: Path
) -> None:
    done = kube("submit", runai_config, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "There is no command `runai`" in done.stderr
    assert server.requests == []


@pytest.mark.parametrize("existing", ["", "describe", "configmaps/ft-config", "secrets/ft-nodes"])
def test_the_printed_script_for_runai_stops_before_it_creates_anything_if_something_exists(
    kube: Callable[..., Any], runai_config: Path, tmp_path: Path, existing: str
) -> None:
    done = kube("submit", runai_config, "--name", "ft", "--print")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "calls"
    answer = (
        f'echo "$0 $*" >> {log}\ncase "$*" in *{existing or "nothing"}*) exit 0 ;; *describe*|*" get "*) exit 1 ;; esac'
    )
    fake_command(tmp_path, "kubectl", f"{answer}\ncat > /dev/null")
    path = fake_command(tmp_path, "runai", answer)
    script = subprocess.run(["sh", "-c", done.stdout], env={"PATH": path}, capture_output=True, text=True)
    calls = log.read_text(encoding="utf-8")
    assert ("exists already" in script.stderr) == bool(existing)
    assert (script.returncode, " apply " in calls, "pytorch submit" in calls) == (
        (1, False, False) if existing else (0, True, True)
    )


@pytest.mark.parametrize("option", ["--print", "--dry-run=client"])
def test_another_namespace_than_the_projects_is_warned_of(
    kube: Callable[..., Any], runai_config: Path, option: str
) -> None:
    done = kube("submit", runai_config, "--name", "ft", option, "--namespace", "elsewhere")
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "has to be the namespace of the Run:ai project lab" in said
    if option == "--print":
        assert "\n# WARNING: cluster.namespace is elsewhere" in done.stdout


def test_the_printed_script_is_valid_shell_without_a_secret_in_it(
    kube: Callable[..., Any], config: Path, tmp_path: Path
) -> None:
    done = kube("submit", config, "--name", "ft", "--print", "--context", "lab")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "submit.sh"
    script.write_text(done.stdout, encoding="utf-8")
    assert subprocess.run(["sh", "-n", script]).returncode == 0
    assert "--validate=strict --field-manager=shardtune" in done.stdout
    assert "stringData" not in done.stdout


def test_the_printed_script_runs_and_hands_the_secret_over_by_a_pipe(manifests: Manifests, tmp_path: Path) -> None:
    """With a kubectl that writes down what it is called with and given."""
    log = tmp_path / "calls"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "ARGS $*" >> {log}\ncase "$*" in\n*jsonpath*) echo uid-1 ;;\n*" get "*) exit 1 ;;\n'
        f'*" create secret "*) cat /dev/stdin > {tmp_path}/value ;;\n*" -f -"*) cat >> {log} ;;\nesac\n',
        encoding="utf-8",
    )
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    script = shell_script(manifests, namespace="ml", context=None)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script], env=environment, check=True)
    value = (tmp_path / "value").read_text(encoding="utf-8")
    assert len(value) == 64
    assert set(value) <= set("0123456789abcdef")
    calls = log.read_text(encoding="utf-8")
    assert value not in calls
    assert calls.count("ARGS --namespace=ml patch") == 3
    documents = [one for one in yaml.safe_load_all(_yaml_of(calls)) if one]
    assert [one["kind"] for one in documents] == ["ConfigMap", "Service", "Job"]
    assert documents[0] == manifests.support[0]


def _yaml_of(calls: str) -> str:
    """What kubectl read, without the lines that say how it was called."""
    return "\n".join("---" if line.startswith("ARGS") else line for line in calls.splitlines())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--print", "--output", "yaml"], "three things to do instead of sending"),
        (["--to", "local-pods", "--print"], "runs no command that could be printed"),
        (["--to", "local-pods", "--dry-run", "server"], "sends nothing to an API server"),
        (["--to", "local-pods", "--volume", "rns=/tmp"], "--volume names the claim 'rns'"),
        (["--volume", "runs=/tmp"], "--volume is for --to docker, podman, local-pods"),
        (["--kind", "job"], "--kind has no effect with --to"),
        (["--no-namespaces"], "are for --to local-pods"),
    ],
)
def test_options_without_effect_are_refused(
    kube: Callable[..., Any], config: Path, options: list[str], words: str
) -> None:
    done = kube("submit", config, *options)
    assert done.returncode == 2 and words in done.stderr, done.stderr
