"""The doctor in an init container: one node of a job, by itself."""

from __future__ import annotations

import json
from pathlib import Path

from running import Command

POD = {"SHARDTUNE_NODES": "3", "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_node_checks_itself_without_a_master_a_secret_or_another_node(shardtune: Command, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{model_name_or_path: org/m}}\ndata: {{dataset_name_or_path: org/d, max_length: 32}}\n"
        f"train: {{output_dir: {tmp_path}}}\nparallel: {{device: cpu, nproc: 1}}\n"
    )
    done = shardtune("doctor", "--this-node", "--json", config, env=POD, timeout=60)
    page = json.loads(done.stdout)
    assert done.returncode == 0 and page["verdict"] in ("ok", "warn"), done.stdout + done.stderr
    assert "master.dns" not in done.stdout


def test_the_exit_code_fails_the_init_container(shardtune: Command) -> None:
    done = shardtune("doctor", "--this-node", "--nproc", "1", env={**POD, "GLOO_SOCKET_IFNAME": "nope0"}, timeout=60)
    assert done.returncode == 1 and "names no interface" in done.stdout


def test_without_the_option_a_pod_that_knows_no_master_is_refused(shardtune: Command) -> None:
    refused = shardtune("doctor", env=POD, timeout=60)
    assert refused.returncode == 2 and "where the master is" in refused.stderr


def test_options_that_name_other_nodes_contradict_it(shardtune: Command) -> None:
    refused = shardtune("doctor", "--this-node", "--nnodes", "3", timeout=60)
    assert refused.returncode == 2 and "--this-node does not go with --nnodes" in refused.stderr
