"""Can the resolved config be read by people, fed back, and traced?"""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest
import yaml
from small_configs import SMALLEST, Load

from shardtune.config import Origin, load_config, render_yaml

AWKWARD = [
    "yes", "no", "null", "~", "1e-4", "0x1F", "true", "", " lead", "trail ", "a: b", "a # b", "- x", "*x", "&x", "!x", "%x", "@x",
    "`x`", "{a}", "[a]", "'q'", '"dq"', "back\\slash", "line\nbreak", "tab\there", "cr\rlf\n", "$${X}", "${X}", "$$${X:-y}",
    "ünïcödé", "emoji 😀", "\u2028sep", "\x85nel", "nbsp\xa0", "bell\x07", "\ufeffbom", "2024-01-01", "1:30", "=", "<<", "---", "...", "#",
]  # fmt: skip


def _back(text: str) -> object:
    Path("again.yaml").write_text(text, encoding="utf-8")
    return load_config(Path("again.yaml"), environ={}).config


@pytest.mark.parametrize("value", AWKWARD)
def test_any_text_survives_being_written_and_read_again(load: Load, value: str) -> None:
    resolved = load(SMALLEST)
    config = resolved.config.model_copy(deep=True)
    config.cluster.env = {"KEY": value, value or "empty": "x"}
    config.data.dataset_name_or_path = [value or "empty", "x"]
    config.train.fallback_dir = value or None
    changed = type(resolved)(config, resolved.origins)
    assert _back(render_yaml(changed)) == config
    assert _back(render_yaml(changed, origins=False)) == config


def test_random_settings_survive_being_written_and_read_again(load: Load) -> None:
    dice = random.Random(7)
    for _ in range(60):
        overrides = [
            f"train.learning_rate={dice.uniform(1e-9, 1) * 10 ** dice.randint(-12, 3)!r}",
            f"train.seed={dice.randint(0, 2**32 - 1)}",
            f"lora.lora_dropout={dice.random()!r}",
            f"train.save_total_limit={dice.choice(['null', '1', '7'])}",
            f"train.bf16={dice.choice(['auto', 'true', 'no'])}",
            f"parallel.nproc={dice.choice(['auto', '3'])}",
            f"lora.target_modules=[{', '.join(dice.choices(['q_proj', 'v', '.*x', '1'], k=3)).replace('1', repr('1'))}]",
            f"model.device_map={''.join(dice.choices(string.ascii_letters + ' .,', k=8))}x",
        ]
        resolved = load(SMALLEST, overrides)
        assert _back(render_yaml(resolved)) == resolved.config


def test_every_line_says_where_its_value_came_from(load: Load) -> None:
    text = SMALLEST + "train:\n  seed: ${SEED}\n"
    lines = render_yaml(load(text, ["lora.r=4"], {"SEED": "5"})).splitlines()
    assert "  seed: ${SEED}                               # file: run.yaml:4:3" in lines
    assert "  r: 4                                        # override: -o lora.r=4" in lines
    assert "  lora_dropout: 0.05                          # default" in lines


def test_without_origins_there_is_no_comment(load: Load) -> None:
    assert "#" not in render_yaml(load(SMALLEST), origins=False)


def test_a_yaml_1_1_reader_sees_the_same_types(load: Load) -> None:
    text = render_yaml(load(SMALLEST, ["train.learning_rate=1e-5", "train.eval_strategy=no"]))
    train = yaml.safe_load(text)["train"]
    assert (train["learning_rate"], train["eval_strategy"]) == (1e-5, "no")


def test_every_setting_has_an_origin(load: Load) -> None:
    resolved = load(SMALLEST, ["train.optim_args.amsgrad=true"])
    expected = {f"{section}.{key}" for section, values in resolved.config for key in type(values).model_fields}
    assert set(resolved.origins) == expected - {"train.optim_args"} | {"train.optim_args.amsgrad"}
    assert resolved.origins["train.seed"] == Origin("default")


def test_an_auto_that_was_settled_says_why(load: Load) -> None:
    before = load(SMALLEST)
    after = before.with_auto("train.bf16", True, "the model is held in bfloat16")
    assert (before.config.train.bf16, after.config.train.bf16) == ("auto", True)
    assert after.origins["train.bf16"] == Origin("auto", "the model is held in bfloat16")
    assert "bf16: true                                  # auto: the model is held in bfloat16" in render_yaml(after)


@pytest.mark.parametrize("path", ["train.nothing", "nothing.seed", "train"])
def test_an_auto_for_a_setting_that_does_not_exist_is_a_programming_error(load: Load, path: str) -> None:
    with pytest.raises(KeyError, match="there is no setting"):
        load(SMALLEST).with_auto(path, 1, "x")


def test_an_override_with_a_line_break_does_not_break_the_comment(load: Load) -> None:
    resolved = load(SMALLEST, ["data.prompt_template={a}\n{b}"])
    assert resolved.config.data.prompt_template == "{a}\n{b}"
    assert _back(render_yaml(resolved)) == resolved.config
