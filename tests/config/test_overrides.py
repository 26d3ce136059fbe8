"""Are overrides typed, merged and checked like the file, and named in errors as they were typed?"""

from __future__ import annotations

import pytest
from small_configs import SMALLEST, Load, Report

from shardtune.config import Origin
from shardtune.config.overrides import read_overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.learning_rate=1e-4", 1e-4), ("train.seed=7", 7), ("train.bf16=true", True), ("train.x=null", None),
        ("train.x=", None), ("train.x=no", "no"), ("train.x='1'", "1"), ('train.x="a b"', "a b"), ("train.x=a=b", "a=b"),
        ("train.x=[a, 2, null]", ["a", 2, None]), ("train.x={k: 1}", {"k": 1}), ("train.x=a: b # c", "a: b # c"),
        ("train.x= 5 ", 5), ("data.prompt_template={q} {a}", "{q} {a}"), ("data.prompt_template=[x] {a}", "[x] {a}"),
        ("data.prompt_template='{a}\n'", "{a} "),
    ],
)  # fmt: skip
def test_a_value_is_typed_like_in_a_file(override: str, value: object) -> None:
    tree, problems = read_overrides([override], {})
    assert not problems
    (inner,) = tree.plain().values()
    assert list(inner.values()) == [value]


def test_overrides_win_over_the_file_and_later_ones_over_earlier(load: Load) -> None:
    resolved = load(SMALLEST + "lora: {r: 1, lora_alpha: 4}\n", ["lora.r=2", "lora.r=3"])
    assert (resolved.config.lora.r, resolved.config.lora.lora_alpha) == (3, 4)
    assert resolved.origins["lora.r"] == Origin("override", "-o lora.r=3")


def test_a_nested_mapping_can_be_set_key_by_key(load: Load) -> None:
    overrides = ["train.optim=sgd", "train.optim_args.momentum=0.9", "train.optim_args={nesterov: true}"]
    assert load(SMALLEST, overrides).config.train.optim_args == {"momentum": 0.9, "nesterov": True}


def test_null_clears_what_the_file_says(load: Load) -> None:
    text = SMALLEST + "train: {save_total_limit: 2, optim_args: {amsgrad: true}}\n"
    train = load(text, ["train.save_total_limit=null", "train.optim_args=null"]).config.train
    assert (train.save_total_limit, train.optim_args) == (None, {})


def test_names_separated_by_commas_are_a_list(load: Load) -> None:
    assert load(SMALLEST, ["lora.target_modules=q_proj,v_proj"]).config.lora.target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seed", "-o train.seed train.seed it has no `=`; write it as section.key=value"),
        ("=5", "-o =5 no key before the `=`"),
        ("train..seed=5", "no key before the `=`"),
        ("train.sed=5", "-o train.sed=5 train.sed unknown key; did you mean `seed`?"),
        ("seed=5", "-o seed=5 seed unknown key; `seed` belongs in `train`"),
        ("lora.r=0", "-o lora.r=0 lora.r expected a whole number, at least 1; got 0"),
        ("train=5", "-o train=5 train `train` is a section, not a single value; name a key in it, as in train.output_dir=…"),
        ("lora.target_modules.0=q", "lora.target_modules expected a string (not empty), or a list of strings; got a mapping (`0: …`)"),
        ("lora.target_modules=[q", "-o lora.target_modules=[q lora.target_modules not valid YAML"),
        ("extends=x.yaml", "`extends` works in files, not in overrides"),
        ("train.fp16=true", "-o train.fp16=true train.fp16 fp16 is not supported"),
        ("train.extra.adam_beta1=0.8", "-o train.extra.adam_beta1=0.8 train.extra `train.extra` is gone: write `train.adam_beta1`"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_quoted_in_the_report(report: Report, override: str, expected: str) -> None:
    said = report(SMALLEST, [override])
    assert "1 problem found" in said
    assert expected in said


def test_problems_of_file_and_overrides_stand_in_one_report(report: Report) -> None:
    said = report(SMALLEST + "lora: {r: 0}\n", ["train.sed=1", "train.seed"])
    assert "3 problems found" in said
    assert said.index("run.yaml:3:11 lora.r") < said.index("-o train.sed")
