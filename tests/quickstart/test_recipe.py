from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shardtune.config.schema import RunConfig
from shardtune.quickstart import recipe
from shardtune.quickstart.sentences import rows
from shardtune.quickstart.weights import tiny_model


@pytest.mark.parametrize("sizes", [recipe.REAL, recipe.TINY])
def test_the_config_is_valid_and_says_what_the_recipe_says(sizes: recipe.Recipe, tmp_path: Path) -> None:
    odd = tmp_path / 'a: "path" #with {everything}'
    text = recipe.config_text(odd / "model", odd / "data", odd / "runs", recipe=sizes, seed=7, nproc=3)
    config = RunConfig.model_validate(yaml.safe_load(text))
    assert config.model.model_name_or_path == str(odd / "model")
    assert config.data.dataset_name_or_path == str(odd / "data")
    assert config.train.output_dir == str(odd / "runs")
    assert config.model.torch_dtype == "float32"
    assert config.train.bf16 is False
    assert config.train.max_steps == sizes.max_steps
    assert config.train.learning_rate == sizes.learning_rate
    assert (config.train.seed, config.parallel.nproc) == (7, 3)
    assert config.data.prompt_template == recipe.PROMPT_TEMPLATE


def test_the_template_filled_in_starts_with_the_prompt_that_scoring_uses() -> None:
    row = rows("test", 1, 0)[0]
    assert recipe.PROMPT_TEMPLATE.format(**row) == recipe.PROMPT.format(sentence=row["sentence"]) + row["json"]


def test_no_row_is_longer_than_the_recipe_allows(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # The toy's tokenizer has 768 entries against 49152: what fits there in tokens fits with room in the real one.
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path, 0))
    texts = [recipe.PROMPT_TEMPLATE.format(**row) for part in ("train", "val", "test") for row in rows(part, 400, 0)]
    assert max(len(ids) for ids in tokenizer(texts)["input_ids"]) < recipe.REAL.max_length


def test_a_run_sees_every_training_row_at_most_about_once() -> None:
    for sizes in (recipe.REAL, recipe.TINY):
        assert sizes.max_steps * sizes.per_device_train_batch_size * 2 <= sizes.n_train * 1.25
