from __future__ import annotations

import pytest
from running import REPOSITORY

from shardtune.plan.public_models import CONFIGS, outline_of_public
from shardtune.plan.readme_table import cell, plan_of, renewed

# As their model cards and checkpoints' indices count them.
PARAMETERS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mistral Small 4": 118_972_826_624,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_public_models_have_the_parameters_they_are_known_for(name: str) -> None:
    assert outline_of_public(name).size == PARAMETERS[name]


@pytest.mark.parametrize("page", ["README.md", "docs/plan.md", "docs/what-fits.md", "docs/mistral-small-4.md"])
def test_pages_hold_what_the_plan_says_today(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    command = f"python -m shardtune.plan.readme_table {page}"
    assert renewed(text) == text, f"run `make reference` ({command})"


def test_a_cell_has_the_micro_batch_the_speed_and_what_helped() -> None:
    small, large = plan_of("Llama-3.2-1B", "1xH200"), plan_of("Llama-3.3-70B", "1x4090")
    assert cell(small).startswith(f"{small.work.tokens:,}: **")
    assert cell(large) == "–" or cell(large).endswith("w"), "141 GB of weights on a card of 24 GB"
