"""Models that are not trained here are refused from their config.json, with the reason and something that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from toys import toy_text_config

from shardtune.errors import UserInputError
from shardtune.model.families.registry import families
from shardtune.model.locate import check_model_folder


@pytest.mark.parametrize(
    ("config", "what", "instead"),
    [
        (transformers.GPT2Config(), "instead of linear layers", "fan_in_fan_out=True"),
        (transformers.BertConfig(), "is an encoder (bert)", "transformers' Trainer with PEFT"),
        (transformers.RobertaConfig(), "is an encoder (roberta)", "transformers' Trainer with PEFT"),
        (transformers.ModernBertConfig(), "is an encoder (modernbert)", "transformers' Trainer with PEFT"),
        (transformers.T5Config(), "is an encoder-decoder model (t5)", "Seq2SeqTrainer with PEFT"),
        (transformers.BartConfig(), "is an encoder-decoder model (bart)", "Seq2SeqTrainer with PEFT"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_what_is_no_decoder_with_linear_layers_is_refused(
    config: transformers.PretrainedConfig, what: str, instead: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserInputError) as refused:
        check_model_folder(str(tmp_path))
    assert what in refused.value.what and refused.value.why
    assert "decoder-only" in refused.value.fix and instead in refused.value.fix


def test_no_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for kind in (kind for family in families() for kind in family.model_types):
        toy_text_config(kind).save_pretrained(tmp_path)
        check_model_folder(str(tmp_path))
