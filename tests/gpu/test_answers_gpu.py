"""Answers on a GPU are those of a CPU, greedy and drawn with a seed; base and tuned model take turns there as well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toys import toy_chat_llama
from transformers import AutoModelForCausalLM

from shardtune.inference.answers import AnsweringModel, SideName, load_answering, prepare_questions
from shardtune.inference.sampling import Sampling
from shardtune.inference.screen import interleaved
from shardtune.inference.source import find_tuned
from shardtune.inference.trained_format import trained_format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIDES: tuple[SideName, ...] = ("base", "tuned")
QUESTION = [{"role": "user", "content": "What is the weather in Paris? 日本"}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers-gpu")
    base = AutoModelForCausalLM.from_pretrained(toy_chat_llama(folder / "base"), dtype=torch.float32)
    model: PeftModel = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def answering(adapter: Path, device: str) -> AnsweringModel:
    found = find_tuned(str(adapter))
    tuned = replace(found, base=found.base.model_copy(update={"torch_dtype": "float32"}))  # on both devices
    return load_answering(prepare_questions(tuned, trained_format(tuned)), torch.device(device))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)], ids=str)
def test_they_are_those_of_the_cpu(adapter: Path, sampling: Sampling) -> None:
    texts = {}
    for device in ("cpu", "cuda"):
        model = answering(adapter, device)
        replies = [model.reply(QUESTION, side, sampling, 32) for side in SIDES]
        for _ in interleaved(replies):
            pass
        texts[device] = {reply.side.name: (reply.text, reply.ended) for reply in replies}
        alone = model.reply(QUESTION, "tuned", sampling, 32)
        assert "".join(alone) == texts[device]["tuned"][0]
    assert texts["cpu"] == texts["cuda"], json.dumps(texts, ensure_ascii=False)
    assert texts["cpu"]["base"] != texts["cpu"]["tuned"]
