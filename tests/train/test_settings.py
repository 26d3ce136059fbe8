"""What is TRL told, and what does it make of that?"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardtune.config.schema import DataSection, ModelSection, RunConfig, TrainSection
from shardtune.plan.steps import training_math
from shardtune.train.settings import trainer_settings


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_lets_transformers_warn_about_what_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The Trainer sets the level of its own logger by rank: of the tokens for padding, every rank but 0 warned."""
    config = RunConfig(
        model=ModelSection(model_name_or_path="m"),
        data=DataSection(dataset_name_or_path="d"),
        train=TrainSection(eval_strategy="no", gradient_checkpointing=False),
    )
    math = training_math(config.train, rows=8, tokens=80, processes=2)
    settings = trainer_settings(config, tmp_path, math, on_cpu=True)
    monkeypatch.setattr(type(settings), "local_process_index", property(lambda self: rank))
    assert settings.get_process_log_level() == logging.ERROR
