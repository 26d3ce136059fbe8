"""What came from the environment is used, and written down as it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_configs import SMALLEST, Load, Report

from shardtune.config import load_config, render_yaml
from shardtune.config.redact import redacted, redacted_settings
from shardtune.config.references import put_back
from shardtune.config.render import as_json

TEXT = """\
model: {model_name_or_path: gpt2, revision: "${REVISION}"}
data:
  dataset_name_or_path:
    - ${ROWS}/a.jsonl
    - {path: "${ROWS}/b.jsonl", weight: 0.5}
    - path: c.jsonl
      weight: ${WEIGHT}
  prompt_template: "{a} $${NOT} ${WORD:-# :} {b}"
lora:
  r: ${R}
  lora_alpha: ${ALPHA:-16}
  target_modules: ${TARGETS}
train:
  learning_rate: ${RATE}
  bf16: ${HALF:-yes}
  adam_beta2: ${BETA}
  lr_scheduler_kwargs:
    list:
      - ${R}
      - x${R}
cluster: {env: {HF_TOKEN: "${HUB}", DB_PASSWORD: "${HUB:-hunter2}", URL: "https://me:${PW}@host", PORT: "${R}"}}
"""
ENVIRON = {"REVISION": "12", "ROWS": "/data/rows-of-ana", "WEIGHT": "0.25", "R": "77", "TARGETS": "q_proj,k_proj",
           "RATE": "0.0625", "BETA": "0.875", "HUB": "hub-value", "PW": "pw-value"}  # fmt: skip


@pytest.fixture(autouse=True)
def _arguments_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nested values a schedule takes is no matter here."""
    monkeypatch.setattr("shardtune.config.resolve.cross_checks", lambda config: ())


def test_the_run_has_the_values_and_nothing_that_is_written_down_does(load: Load) -> None:
    resolved = load(TEXT, environ=ENVIRON)
    config = resolved.config
    assert (config.lora.r, config.lora.target_modules, config.model.revision) == (77, ["q_proj", "k_proj"], "12")
    assert config.data.prompt_template == "{a} ${NOT} # : {b}" and config.cluster.env["HF_TOKEN"] == "hub-value"
    written = [render_yaml(resolved), render_yaml(redacted(resolved)), json.dumps(as_json(resolved)), json.dumps(redacted_settings(config))]  # fmt: skip
    for text in written:
        for value in ("77", "rows-of-ana", "0.25", "k_proj", "0.0625", "0.875", "hub-value", "pw-value"):
            assert value not in text, (value, text)
        for reference in (
            "${REVISION}",
            "${ROWS}/a.jsonl",
            "${R}",
            "${ALPHA:-16}",
            "${TARGETS}",
            "${HUB}",
            "https://me:${PW}@host",
        ):
            assert reference in text, (reference, text)
    assert "hunter2" not in written[1] + written[3]  # a secret that the user wrote himself


def test_what_is_written_down_loads_again_to_the_same_values_and_types(folder: Path, load: Load) -> None:
    resolved = load(TEXT, environ=ENVIRON)
    (folder / "kept.yaml").write_text(render_yaml(resolved))
    again = load_config(Path("kept.yaml"), environ=ENVIRON)
    assert again.config.model_dump() == resolved.config.model_dump()
    assert render_yaml(again, origins=False) == render_yaml(resolved, origins=False)
    changed = load_config(Path("kept.yaml"), environ={**ENVIRON, "R": "78", "HALF": "auto", "TARGETS": "all-linear"})
    assert (changed.config.lora.r, changed.config.train.bf16, changed.config.lora.target_modules) == (78, "auto", "all-linear")  # fmt: skip
    assert changed.config.train.lr_scheduler_kwargs == {"list": [78, "x78"]}


def test_overrides_are_references_where_the_shell_left_them_alone(load: Load) -> None:
    resolved = load(SMALLEST, ["lora.r=${R}", "train.seed=5"], {"R": "77"})
    assert "  r: ${R} " in render_yaml(resolved) and "  seed: 5 " in render_yaml(resolved)
    assert resolved.origins["lora.r"].where == "-o lora.r=${R}"


def test_a_literal_dollar_brace_is_no_reference(load: Load) -> None:
    resolved = load(SMALLEST + 'cluster: {env: {A: "$${HOME}"}}\n')
    assert resolved.config.cluster.env["A"] == "${HOME}" and '"$${HOME}"' in render_yaml(resolved)


def test_what_an_auto_turned_out_to_be_replaces_its_reference(load: Load) -> None:
    resolved = load(SMALLEST + "train:\n  bf16: ${HALF}\n  seed: ${SEED}\n", environ={"HALF": "auto", "SEED": "7351"})
    settled = resolved.with_auto("train.bf16", True, "the model is held in bfloat16")
    written = redacted_settings(settled.config)["train"]
    assert (written["bf16"], written["seed"]) == (True, "${SEED}")
    assert redacted_settings(settled.config.model_copy())["train"]["seed"] == "${SEED}"


def test_files_named_by_references_are_told_by_them(folder: Path) -> None:
    (folder / "hidden" / "deep").mkdir(parents=True)
    (folder / "hidden" / "base.yaml").write_text(
        "extends: deep/base.yaml\nparallel: {accelerate_config: '${NAME}.yaml'}\n"
    )
    (folder / "hidden" / "deep" / "base.yaml").write_text(SMALLEST)
    (folder / "hidden" / "shadow.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
    )
    (folder / "run.yaml").write_text("extends: ${WHERE}/base.yaml\n")
    environ = {"WHERE": "hidden", "NAME": "shadow"}
    resolved = load_config(Path("run.yaml"), environ=environ)
    assert resolved.origins["model.model_name_or_path"].where == "${WHERE}/deep/base.yaml:1:9"
    assert resolved.config.parallel.offload_params and "shadow" not in render_yaml(resolved)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "kept.yaml").write_text(render_yaml(resolved))
    again = load_config(folder / "elsewhere" / "kept.yaml", environ=environ)
    assert again.config.parallel.accelerate_config == resolved.config.parallel.accelerate_config


def test_a_message_quotes_the_value_of_a_variable_unless_its_name_is_that_of_a_secret(report: Report) -> None:
    text = SMALLEST + "lora:\n  r: ${R}\n  target_modules: [q_proj, '${HF_TOKEN}', 3]\ntrain:\n  seed: ${HF_TOKEN}\n"
    answer = report(text, environ={"R": "eight", "HF_TOKEN": "hunter2"})
    assert "got 'eight'" in answer and "got '${HF_TOKEN}'" in answer and "hunter2" not in answer


def test_notices_name_the_reference(load: Load) -> None:
    text = "model: {model_name_or_path: gpt2, device_map: '${WHERE}'}\ndata: {dataset_name_or_path: d}\n"
    assert "model.device_map (${WHERE}) has no effect" in load(text, environ={"WHERE": "cuda:7351"}).notices[0]


@pytest.mark.parametrize(("tagged", "says"), [('!!int "${R}"', ""), ('!!float "${R}"', "not have the type of its YAML tag !!float"), ('!!bool "${R}"', "!!bool")])  # fmt: skip
def test_a_tag_says_what_a_quoted_reference_is(
    folder: Path, tagged: str, says: str, load: Load, report: Report
) -> None:
    text = SMALLEST + f"train: {{seed: {tagged}}}\n"
    if says:
        assert says in report(text, environ={"R": "3"})
    else:
        assert load(text, environ={"R": "3"}).config.train.seed == 3


def test_texts_of_a_run_get_their_references_back(load: Load) -> None:
    config = load(SMALLEST, ["data.cache_dir=${CACHE}"], {"CACHE": "/mnt/private"}).config
    said = {"folder": "/mnt/private/prepared/1", "errors": ["/mnt/private/x:3 bad"], "rows": 3}
    assert put_back(config, said) == {"folder": "${CACHE}/prepared/1", "errors": ["${CACHE}/x:3 bad"], "rows": 3}
