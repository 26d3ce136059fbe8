"""Every way in which a cluster says no, in words, with its own message as it came."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, Refusal

from shardtune.cluster.api import Cluster, connect
from shardtune.cluster.api_errors import ApiError, Call, ClusterError, api_error
from shardtune.cluster.resources import CONFIG_MAP, JOB, POD, PYTORCHJOB, TRAINJOB
from shardtune.errors import UserInputError

CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "v"}}


def refusal(code: int, message: str, **details: Any) -> ApiError:
    body = {"kind": "Status", "message": message, "reason": "", "details": details}
    return api_error(Call("create", POD, "ml", "ft-0"), code, json.dumps(body).encode())


def test_a_cluster_that_is_not_there_is_named_with_its_address_and_context(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, url=url)))
    with pytest.raises(ClusterError) as caught:
        connect().list_all(JOB)
    assert url in caught.value.what
    assert "context 'lab'" in caught.value.what
    assert "0x" not in str(caught.value)  # no addresses of urllib3's objects


def test_a_server_that_accepts_and_stays_silent_is_given_up(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Cluster._request.__kwdefaults__, "read_seconds", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, url=url)))
        with pytest.raises(ClusterError, match="does not answer"):
            connect().list_all(JOB)


def test_plain_http_where_tls_is_expected_is_a_tls_error(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url.replace("http:", "https:")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, url=url)))
    with pytest.raises(ClusterError, match="No secure connection to https://"):
        connect().list_all(JOB)


def test_a_page_that_is_no_api_server_is_said_to_be_none(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "objects", {})
    monkeypatch.setattr("api_server.json.dumps", lambda *_, **__: "<html>Log in</html>")
    with pytest.raises(ClusterError, match="not a Kubernetes API server"):
        cluster.list_all(JOB)


def test_an_expired_token_says_to_log_in_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, token="expired")))
    with pytest.raises(ApiError) as caught:
        connect().list_all(JOB)
    assert "do" in caught.value.what
    assert "401" in caught.value.what
    assert "Log in again" in caught.value.fix
    assert "expired" not in caught.value.why  # the token itself


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "cannot be used"), ("{}", "Expected key current-context"), (None, "There is no kubeconfig")],
)
def test_a_kubeconfig_that_is_broken_or_missing_is_named(
    content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UserInputError) as caught:
        connect()
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_context_that_does_not_exist_is_answered_with_those_that_do(cluster: Cluster) -> None:
    with pytest.raises(UserInputError) as caught:
        connect("prod")
    assert "It has: lab" in caught.value.fix


def test_a_missing_permission_names_verb_resource_and_namespace(server: ApiServer, cluster: Cluster) -> None:
    server.forbidden.add(("create", "configmaps"))
    with pytest.raises(ApiError) as caught:
        cluster.create(CONFIG)
    assert caught.value.what == "You have no permission to create configmaps in namespace 'ml'."
    assert 'User "dev" cannot create resource "configmaps"' in caught.value.why


@pytest.mark.parametrize(("resource", "operator"), [(PYTORCHJOB, "Training Operator"), (TRAINJOB, "Kubeflow Trainer")])
def test_a_kind_without_its_operator_names_the_operator_and_a_way_without(
    resource: Any, operator: str, server: ApiServer, cluster: Cluster
) -> None:
    server.crds.clear()
    with pytest.raises(ApiError) as caught:
        cluster.list_all(resource)
    assert operator in caught.value.what
    assert "not installed" in caught.value.what
    assert "--to job" in caught.value.fix
    assert caught.value.missing_kind


def test_a_namespace_that_does_not_exist_is_not_mistaken_for_a_missing_object(cluster: Cluster) -> None:
    with pytest.raises(ApiError) as caught:
        cluster.create(CONFIG, namespace="nowhere")
    assert caught.value.what == "The namespace 'nowhere' does not exist."
    assert not caught.value.missing_kind


def test_an_unknown_field_is_named_by_create_and_by_apply(cluster: Cluster) -> None:
    with pytest.raises(ApiError, match=r"has no field data\.bogus"):
        cluster.create({**CONFIG, "data": {"bogus": "1"}})
    apply = "failed to create typed patch object (/a; batch/v1, Kind=Job): .spec.bogus: field not declared in schema"
    assert "has no field spec.bogus" in refusal(500, apply).what


def test_a_value_that_apply_cannot_convert_is_not_called_temporary() -> None:
    words = "failed to convert new object (ml/q0; batch/v1, Kind=Job) to proper version: quantities must match"
    assert "again in a minute" not in refusal(500, words).fix


def test_invalid_fields_are_named() -> None:
    words = 'Pod "ft-0" is invalid: spec.containers[0].image: Required value'
    error = refusal(422, words, causes=[{"field": "spec.containers[0].image", "message": "Required value"}])
    assert "spec.containers[0].image" in error.what
    assert words in error.why


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("pods is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=4, used: 0, limited: 1", "quota"),
        ('pods "a" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true', "Pod Security"),
        ('unable to create new content in namespace ml because it is being terminated', "being deleted"),
        ('pods "a" is forbidden: error looking up service account ml/x: serviceaccount "x" not found', "does not exist"),
        ('admission webhook "vjob.kb.io" denied the request: spec is wrong', "admission webhook"),
    ],
)  # fmt: skip
def test_refusals_of_admission_are_told_apart(message: str, said: str) -> None:
    error = refusal(403, message)
    assert said in error.what
    assert error.why == f"The server says: {message}"


def test_openshifts_constraints_are_said_in_words_without_those_for_others() -> None:
    message = (
        'pods "ft-0" is forbidden: unable to validate against any security context constraint: [provider "anyuid": '
        "Forbidden: not usable by user or serviceaccount, provider restricted-v2: .containers[0].runAsUser: Invalid "
        "value: 2000: must be in the ranges: [1000680000, 1000689999], provider restricted-v2: "
        '.containers[0].capabilities.add: Invalid value: "IPC_LOCK": capability may not be added, provider '
        '"privileged": Forbidden: not usable by user or serviceaccount]'
    )
    what = refusal(403, message).what
    assert "2000" in what
    assert "must be in the ranges" in what
    assert "IPC_LOCK" in what
    assert "anyuid" not in what
    assert "privileged" not in what


def test_a_webhook_that_does_not_answer_is_the_administrators_matter() -> None:
    error = refusal(500, 'Internal error occurred: failed calling webhook "x": connect: connection refused')
    assert "does not answer" in error.what
    assert "administrator" in error.fix


def test_warnings_of_the_server_are_kept(server: ApiServer, cluster: Cluster) -> None:
    server.warnings = ['would violate PodSecurity "restricted"']
    cluster.create(CONFIG)
    assert cluster.warnings == ['would violate PodSecurity "restricted"']


def test_nothing_is_tried_twice(server: ApiServer, cluster: Cluster) -> None:
    server.refuse["create", "configmaps"] = Refusal(503, "ServiceUnavailable", "the server is busy")
    with pytest.raises(ApiError, match="could not create"):
        cluster.create(CONFIG)
    assert len(server.requests) == 1
    assert cluster.find(CONFIG_MAP, "a") is None


def test_the_command_line_prints_the_error_without_a_traceback(kube: Callable[..., Any], server: ApiServer) -> None:
    server.forbidden |= {("list", plural) for plural in ("jobs", "jobsets", "pytorchjobs", "trainjobs")}
    done = kube("jobs")
    assert done.returncode == 1
    assert "error: You have no permission to list trainjobs in namespace 'ml'." in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_package_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    monkeypatch.setitem(__import__("sys").modules, "kubernetes.client", None)
    with pytest.raises(UserInputError) as caught:
        connect()
    assert "shardtune[cluster]" in caught.value.fix


def test_of_a_web_page_only_its_first_line_is_quoted() -> None:
    page = b"<html>\n<head><title>503 Service Unavailable</title></head>\n<body><p>proxy</p></body></html>"
    assert api_error(Call("get", POD, "ml", "ft-0"), 503, page).why == "The server says: 503 Service Unavailable"


def test_the_quotas_hint_names_the_namespace() -> None:
    body = json.dumps({"message": "pods is forbidden: exceeded quota: gpus"}).encode()
    assert "shardtune jobs -n ml." in api_error(Call("create", POD, "ml", "ft-0"), 403, body, " -n ml").fix
