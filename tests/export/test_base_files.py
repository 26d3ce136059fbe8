"""Which tokenizer leaves with a model whose own one is gone: the base's where it has all tokens, or the export is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from export.exporting import export
from transformers import AutoTokenizer
from tuned_toys import adapted_toy

from shardtune.errors import UserInputError
from shardtune.export.request import TargetName


def adapter_with_tokenizer(folder: Path, **settings: object) -> tuple[Path, AutoTokenizer]:
    adapted_toy("llama", "LlamaForCausalLM", {"target_modules": ["q_proj"], **settings}, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder / "adapter")
    assert (folder / "adapter" / "chat_template.jinja").is_file()
    return folder / "adapter", tokenizer


@pytest.mark.parametrize("target", ["merged", "adapter"])
def test_beside_a_chat_template_alone_the_tokenizer_is_the_bases(target: TargetName, tmp_path: Path) -> None:
    adapter, tokenizer = adapter_with_tokenizer(tmp_path)
    for file in adapter.glob("tokenizer*"):
        file.unlink()
    export(adapter, tmp_path / "out", target)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("target", ["merged", "adapter", "vllm"])
def test_where_the_base_lacks_tokens_that_were_trained_it_is_refused(target: TargetName, tmp_path: Path) -> None:
    adapter, tokenizer = adapter_with_tokenizer(tmp_path, trainable_token_indices={"embed_tokens": [70]})
    assert len(tokenizer) < 70  # a spare row: the embedding has not grown
    for file in adapter.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserInputError, match="has no tokenizer, and the base's does not have all of its tokens"):
        export(adapter, tmp_path / "out", target)


@pytest.mark.parametrize("target", ["merged", "adapter"])
def test_a_tokenizer_with_files_missing_is_refused(target: TargetName, tmp_path: Path) -> None:
    adapter, _ = adapter_with_tokenizer(tmp_path)
    (adapter / "tokenizer.json").unlink()
    with pytest.raises(UserInputError, match="Could not load a tokenizer"):
        export(adapter, tmp_path / "out", target)
