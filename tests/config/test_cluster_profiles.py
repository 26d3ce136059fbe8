"""A site's profile lies under the section `cluster`, only for commands that submit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import ConfigError, ResolvedConfig, load_config

SMALLEST = "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: rows.jsonl}\n"
PROFILES = "site:\n  image: registry.example/i\n  memory: 96Gi\n  env: {A: site, B: site}\n"


def load(tmp_path: Path, cluster: str, profiles: str | None = PROFILES, *overrides: str) -> ResolvedConfig:
    if profiles is not None:
        (tmp_path / "shardtune").mkdir()
        (tmp_path / "shardtune" / "clusters.yaml").write_text(profiles)
    (tmp_path / "run.yaml").write_text(f"{SMALLEST}cluster: {cluster}\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    return load_config(tmp_path / "run.yaml", overrides, environ=environ, cluster_profile=True)


def problems(tmp_path: Path, cluster: str, profiles: str | None = PROFILES) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, cluster, profiles)
    return str(error.value)


def test_the_file_and_the_command_line_win_over_the_profile(tmp_path: Path) -> None:
    resolved = load(tmp_path, "{profile: site, env: {A: mine}, memory: 8Gi}", PROFILES, "cluster.memory=9Gi")
    cluster = resolved.config.cluster
    assert (cluster.image, cluster.memory, cluster.env) == ("registry.example/i", "9Gi", {"A": "mine", "B": "site"})
    assert resolved.origins["cluster.image"].where.endswith("clusters.yaml:2:3")


def test_training_does_not_look_for_profiles(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{SMALLEST}cluster: {{profile: site}}\n")
    assert load_config(tmp_path / "run.yaml", environ={}).config.cluster.profile == "site"


def test_an_unknown_profile_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    assert "there is no profile 'sit'" in problems(tmp_path, "{profile: sit}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "shardtune/clusters.yaml'" in problems(tmp_path, "{profile: site}", None)


def test_a_mistake_in_the_profile_is_reported_where_it_stands(tmp_path: Path) -> None:
    text = problems(tmp_path, "{profile: site}", "site:\n  imagee: x\n")
    assert "clusters.yaml:2:3" in text and "did you mean `image`?" in text


@pytest.mark.parametrize("profiles", ["- a\n", "site: 3\n", "", "site:\n  volumes: [{claim: a}]\n"])
def test_what_is_no_profile_is_refused(tmp_path: Path, profiles: str) -> None:
    assert "clusters.yaml" in problems(tmp_path, "{profile: site}", profiles)
