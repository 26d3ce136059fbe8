"""Do ${VAR} and ${VAR:-default} stand for the environment, in values only and once?"""

from __future__ import annotations

import pytest
from small_configs import SMALLEST, Load, Report

from shardtune.config.expansion import escape, expand


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}", "1"), ("x${A}y${A}", "x1y1"), ("${B:-two}", "two"), ("${A:-two}", "1"), ("${E:-full}", "full"),
        ("${E}", ""), ("$${A}", "${A}"), ("$A", "$A"), ("${B:-}", ""), ("${B:-a:-b}", "a:-b"), ("${R}", "${A}"),
    ],
)  # fmt: skip
def test_a_text_is_expanded_once(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "E": "", "R": "${A}"}) == expected


@pytest.mark.parametrize("text", ["${A}", "$${A}", "$$${", "a ${", "$", "{}"])
def test_an_escaped_text_expands_to_itself(text: str) -> None:
    assert expand(escape(text), {}) == text


def test_an_unquoted_value_is_typed_after_expansion_and_a_quoted_one_stays_text(load: Load) -> None:
    text = SMALLEST + "train: {learning_rate: '${LR}'}\nlora:\n  r: ${R}\ncluster: {env: {N: \"${R}\"}}\n"
    config = load(text, environ={"LR": "3e-4", "R": "8"}).config
    assert (config.train.learning_rate, config.lora.r, config.cluster.env) == (3e-4, 8, {"N": "8"})


def test_a_variable_that_is_not_set_is_a_problem_at_its_place(report: Report) -> None:
    said = report(SMALLEST + "train:\n  seed: ${NOPE}\n")
    assert "1 problem found" in said
    assert "run.yaml:4:9 train.seed the environment variable NOPE is not set; set it, or write ${NOPE:-default}" in said


def test_a_missing_variable_in_a_required_value_is_not_reported_as_a_missing_key(report: Report) -> None:
    said = report("model:\n  model_name_or_path: ${M}\ndata: {dataset_name_or_path: d}\n")
    assert "1 problem found" in said
    assert "run.yaml:2:23 model.model_name_or_path the environment variable M is not set" in said


def test_a_missing_variable_does_not_matter_where_an_override_replaces_the_value(load: Load) -> None:
    assert load(SMALLEST + "train:\n  seed: ${NOPE}\n", ["train.seed=5"]).config.train.seed == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [("${A", "`${` is never closed"), ("${1x}", "`${1x}` does not name a variable"), ("${}", "`${}` does not name")],
)
def test_a_reference_that_makes_no_sense_is_a_problem(report: Report, value: str, expected: str) -> None:
    said = report(f"model:\n  model_name_or_path: {value}\ndata: {{dataset_name_or_path: d}}\n")
    assert "run.yaml:2:23 model.model_name_or_path" in said
    assert expected in said


def test_keys_are_never_expanded(report: Report) -> None:
    assert "${K}" in report(SMALLEST + "train:\n  ${K}: 1\n", environ={"K": "seed"})


def test_overrides_are_expanded_too(load: Load, report: Report) -> None:
    assert load(SMALLEST, ["train.seed=${S}"], {"S": "9"}).config.train.seed == 9
    assert "-o train.seed=${S} train.seed the environment variable S is not set" in report(
        SMALLEST, ["train.seed=${S}"]
    )


def test_a_missing_variable_inside_a_list_is_a_problem_at_the_item(report: Report) -> None:
    said = report(SMALLEST + 'lora:\n  target_modules: [q_proj, "${NOPE}"]\n')
    assert "run.yaml:4:28 lora.target_modules[1] the environment variable NOPE is not set" in said
