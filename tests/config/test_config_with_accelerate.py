"""Do accelerate's settings stand below the user's own and above the defaults?"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_configs import SMALLEST

from shardtune.config import ConfigError, Origin, load_config, render_yaml

FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
"""
LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}


@pytest.fixture
def files(folder: Path) -> Path:
    (folder / "sub").mkdir()
    (folder / "sub" / "fsdp.yaml").write_text(FSDP)
    (folder / "run.yaml").write_text(SMALLEST)
    return folder


def test_accelerate_s_values_win_over_defaults_and_lose_against_the_user(files: Path) -> None:
    (files / "run.yaml").write_text(SMALLEST + "parallel: {reshard_after_forward: true}\n")
    resolved = load_config(Path("run.yaml"), accelerate_config=Path("sub/fsdp.yaml"), environ={})
    assert resolved.config.parallel.offload_params is True
    assert resolved.config.parallel.reshard_after_forward is True
    assert resolved.origins["parallel.offload_params"] == Origin("accelerate", "fsdp.yaml:fsdp_offload_params")
    assert resolved.origins["parallel.reshard_after_forward"] == Origin("file", "run.yaml:3:12")
    verdicts = {verdict.key: verdict.verdict for verdict in resolved.verdicts}
    assert verdicts["fsdp_offload_params"] == "honoured"
    assert verdicts["fsdp_reshard_after_forward"] == "conflicts"


def test_offloading_is_said_to_have_no_effect_where_the_device_is_a_cpu(files: Path) -> None:
    resolved = load_config(
        Path("run.yaml"), ["parallel.device=cpu"], accelerate_config=Path("sub/fsdp.yaml"), environ={}
    )
    verdict = next(one for one in resolved.verdicts if one.key == "fsdp_offload_params")
    assert verdict.verdict == "no effect" and "CPU" in verdict.why
    (notice,) = [notice for notice in resolved.notices if "offload" in notice]
    assert notice.startswith("parallel.offload_params has no effect")
    assert resolved.config.parallel.offload_params is True  # the same file may go to a machine with a GPU
    assert resolved.on_device("cpu") == resolved


def test_a_path_in_the_yaml_is_relative_to_it_and_one_on_the_command_line_to_the_current_folder(files: Path) -> None:
    (files / "sub" / "run.yaml").write_text(SMALLEST + "parallel: {accelerate_config: fsdp.yaml}\n")
    from_file = load_config(Path("sub/run.yaml"), environ={})
    from_override = load_config(Path("run.yaml"), ["parallel.accelerate_config=sub/fsdp.yaml"], environ={})
    expected = str(files / "sub" / "fsdp.yaml")
    for resolved in (from_file, from_override):
        assert resolved.config.parallel.offload_params is True
        assert resolved.config.parallel.accelerate_config == expected


def test_the_command_line_s_file_wins_over_the_yaml_s(files: Path) -> None:
    (files / "run.yaml").write_text(SMALLEST + "parallel: {accelerate_config: missing.yaml}\n")
    resolved = load_config(Path("run.yaml"), accelerate_config=Path("sub/fsdp.yaml"), environ={})
    assert resolved.origins["parallel.accelerate_config"] == Origin("override", "--accelerate-config sub/fsdp.yaml")
    assert resolved.config.parallel.offload_params is True


def test_a_missing_accelerate_file_is_a_problem_where_it_is_named(files: Path) -> None:
    (files / "run.yaml").write_text(SMALLEST + "parallel:\n  accelerate_config: missing.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), environ={})
    assert str(caught.value.problems[0].place) == "run.yaml:4:22"
    assert "does not exist" in str(caught.value)


def test_problems_of_the_accelerate_file_stand_in_the_same_report(files: Path) -> None:
    (files / "sub" / "fsdp.yaml").write_text(FSDP.replace("offload", "ofload"))
    (files / "run.yaml").write_text(SMALLEST + "train: {sed: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), accelerate_config=Path("sub/fsdp.yaml"), environ={})
    said = " ".join(str(caught.value).split())
    assert (
        "fsdp.yaml:4 fsdp_ofload_params accelerate has no such key in fsdp_config. Did you mean `fsdp_offload_params`?"
        in said
    )
    assert "run.yaml:3:9 train.sed" in said


def test_what_accelerate_launch_hands_over_counts_too(files: Path) -> None:
    resolved = load_config(Path("run.yaml"), environ=LAUNCHED)
    assert resolved.config.parallel.offload_params is True
    assert resolved.origins["parallel.offload_params"] == Origin("accelerate", "accelerate launch:FSDP_OFFLOAD_PARAMS")


def test_beside_a_file_what_accelerate_launch_hands_over_is_said_not_to_be_read(files: Path) -> None:
    resolved = load_config(Path("run.yaml"), accelerate_config=Path("sub/fsdp.yaml"), environ=LAUNCHED)
    assert any("the settings of `accelerate launch` are ignored" in notice for notice in resolved.notices)


def test_the_resolved_yaml_with_an_accelerate_file_loads_to_the_same_config_from_another_folder(files: Path) -> None:
    resolved = load_config(Path("run.yaml"), accelerate_config=Path("sub/fsdp.yaml"), environ={})
    (files / "sub" / "again.yaml").write_text(render_yaml(resolved))
    assert load_config(Path("sub/again.yaml"), environ={}).config == resolved.config
