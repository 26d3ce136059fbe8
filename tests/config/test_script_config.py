"""The config of a script's run: processes, folder and job; what trains a model is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import ConfigError, Origin, load_config, render_yaml
from shardtune.config.script_config import is_script_setting, load_script_config, script_yaml


def problems(path: Path | None, *overrides: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_script_config(path, overrides, environ or {})
    return str(error.value)


def written(folder: Path, text: str, name: str = "cluster.yaml") -> Path:
    (folder / name).write_text(text)
    return Path(name)


def test_without_a_file_the_defaults_and_the_command_line_hold(folder: Path) -> None:
    resolved = load_script_config(None, ["parallel.nproc=2", "train.output_dir=out"], {})
    assert (resolved.config.parallel.nproc, resolved.config.train.output_dir) == (2, "out")
    assert resolved.config.parallel.step_timeout_minutes == 10
    assert resolved.origins["parallel.nproc"] == Origin("override", "-o parallel.nproc=2")
    assert resolved.origins["parallel.max_restarts"] == Origin("default")


def test_a_file_and_what_it_extends_are_merged_and_overrides_win(folder: Path) -> None:
    written(folder, "cluster: {nodes: 2, memory: 8Gi}\nparallel: {nproc: 8}\n", "site.yaml")
    file = written(folder, "extends: site.yaml\ncluster:\n  nodes: 3\n  image: ${IMAGE}\n")
    resolved = load_script_config(file, ["parallel.nproc=4"], {"IMAGE": "registry.example/i"})
    cluster = resolved.config.cluster
    assert (cluster.nodes, cluster.memory, cluster.image) == (3, "8Gi", "registry.example/i")
    assert resolved.config.parallel.nproc == 4
    assert resolved.origins["cluster.nodes"] == Origin("file", "cluster.yaml:3:3")
    assert resolved.origins["cluster.memory"] == Origin("file", "site.yaml:1:21")


def test_a_site_s_profile_lies_under_the_section_cluster(folder: Path) -> None:
    (folder / "shardtune").mkdir()
    (folder / "shardtune" / "clusters.yaml").write_text("site: {image: registry.example/i, nodes: 4}\n")
    environ = {"XDG_CONFIG_HOME": str(folder)}
    overrides = ["cluster.profile=site", "cluster.nodes=2"]
    cluster = load_script_config(None, overrides, environ, cluster_profile=True).config.cluster
    assert (cluster.image, cluster.nodes) == ("registry.example/i", 2)
    assert load_script_config(None, overrides, environ).config.cluster.image is None


@pytest.mark.parametrize(
    ("text", "place", "key"),
    [
        ("parallel: {nproc: 2}\nmodel:\n  model_name_or_path: gpt2\n", "cluster.yaml:2:1", "model"),
        ("lora: {r: 8}\n", "cluster.yaml:1:1", "lora"),
        ("guards: {memory: stop}\n", "cluster.yaml:1:1", "guards"),
        ("train:\n  output_dir: runs\n  learning_rate: 1e-4\n", "cluster.yaml:3:3", "train.learning_rate"),
        ("parallel: {shard: full}\n", "cluster.yaml:1:12", "parallel.shard"),
        ("parallel: {accelerate_config: fsdp.yaml}\n", "cluster.yaml:1:12", "parallel.accelerate_config"),
    ],
)
def test_what_trains_a_model_is_refused_at_its_line(folder: Path, text: str, place: str, key: str) -> None:
    report = problems(written(folder, text))
    assert f"{place}  {key}\n    no effect on a script: it belongs to `shardtune train`" in report
    assert "1 problem found" in report


def test_an_override_that_trains_a_model_is_refused_too(folder: Path) -> None:
    report = problems(None, "train.seed=1", "data.dataset_name_or_path=rows.jsonl")
    assert report.startswith("the command line: 2 problems found, nothing was started.")
    assert "-o train.seed=1  train.seed\n" in report
    assert "of `train`, a script's run has output_dir, run_folder_access" in " ".join(report.split())
    assert "-o data.dataset_name_or_path=rows.jsonl  data\n" in report


def test_a_command_of_the_config_s_own_is_refused_because_the_script_is_the_command(folder: Path) -> None:
    report = problems(written(folder, "cluster:\n  command: [python, x.py]\n"))
    assert "cluster.yaml:2:3  cluster.command" in report and "the command line after `--`" in report


def test_a_command_in_a_profile_is_refused_at_its_line_there(folder: Path) -> None:
    (folder / "shardtune").mkdir()
    (folder / "shardtune" / "clusters.yaml").write_text("site:\n  command: [x]\n")
    with pytest.raises(ConfigError, match=r"clusters\.yaml:2:3  cluster\.command"):
        load_script_config(None, ["cluster.profile=site"], {"XDG_CONFIG_HOME": str(folder)}, cluster_profile=True)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("parallel: {nprocs: 2}\n", "did you mean `nproc`?"),
        ("nproc_per_node: 2\n", "did you mean `parallel.nproc`?"),
        ("train: {out_dir: x}\n", "did you mean `output_dir`?"),
        ("clustr: {nodes: 2}\n", "did you mean `cluster`?"),
        ("cluster: {imagee: x}\n", "did you mean `image`?"),
        ("parallel: {lr: 1}\n", "of `parallel`, a script's run has nproc, device,"),
        ("lr: 1\n", "the sections of a script's run are cluster, parallel, train"),
    ],
)
def test_an_unknown_key_is_answered_with_a_setting_that_a_script_has(folder: Path, text: str, meant: str) -> None:
    assert meant in " ".join(problems(written(folder, text)).split())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "", "give no config"),
        ("a.yaml", "- 1\n", "not sections (`cluster:`, `parallel:`, …)"),
        ("train.py", "import torch\n", "`shardtune run -- train.py` runs the script itself"),
        ("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 2\n", "this is an accelerate config; of it, a script's"),
        ("a.yaml", "train: 3\n", "expected a section"),
        ("a.yaml", "parallel: {nproc: none}\n", "parallel.nproc"),
        ("a.yaml", "cluster: {image: '${NOT_SET}'}\n", "NOT_SET"),
    ],
)
def test_a_file_that_is_no_config_of_a_script_is_refused(folder: Path, name: str, text: str, said: str) -> None:
    assert said in " ".join(problems(written(folder, text, name)).split())


def test_a_missing_file_is_named(folder: Path) -> None:
    assert "there is no file 'cluster.yaml'" in problems(Path("cluster.yaml"))


def test_every_problem_is_listed_because_config_validate_reads_configs_of_training(folder: Path) -> None:
    text = "train:\n" + "".join(f"  {key}: 1\n" for key in load_config_keys()[:30])
    report = problems(written(folder, text))
    assert "30 problems" in report and "config validate" not in report


def load_config_keys() -> list[str]:
    from shardtune.config.schema import TrainSection

    return [key for key in TrainSection.model_fields if not is_script_setting(f"train.{key}")]


def test_what_is_written_down_is_read_back_the_same_and_names_no_model(folder: Path) -> None:
    overrides = ["parallel.nproc=2", "cluster.nodes=2", "cluster.env={A: '${HOME_OF_A}'}"]
    environ = {"HOME_OF_A": "/a"}
    resolved = load_script_config(None, overrides, environ)
    text = script_yaml(resolved)
    assert "model" not in text and "own" not in text and "/a" not in text and "command" not in text
    again = load_script_config(written(folder, text), (), environ)
    assert again.config == resolved.config and script_yaml(again) == text


def test_an_auto_can_be_resolved_as_in_any_config(folder: Path) -> None:
    resolved = load_script_config(None, (), {}).with_auto("parallel.nproc", 8, "cluster.gpus_per_node")
    assert resolved.config.parallel.nproc == 8
    assert "nproc: 8" in render_yaml(resolved, keep=is_script_setting)


def test_a_config_of_training_is_none_of_a_script_and_the_other_way_round(folder: Path) -> None:
    file = written(folder, "cluster: {nodes: 2}\n")
    with pytest.raises(ConfigError, match=r"model\.model_name_or_path"):
        load_config(file, environ={})
