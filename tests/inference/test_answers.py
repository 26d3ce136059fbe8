"""Tuned model and base answer as plain transformers and PEFT generate, and stop where an answer ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from toy_run import toy_run
from toys import toy_chat_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.errors import MachineError, UserInputError
from shardtune.inference.answers import AnsweringModel, Reply, SideName, load_answering, prepare_questions, room_for
from shardtune.inference.decoding import Decoder
from shardtune.inference.sampling import Sampling
from shardtune.inference.screen import interleaved
from shardtune.inference.source import find_tuned
from shardtune.inference.trained_format import trained_format

SIDES: tuple[SideName, ...] = ("base", "tuned")
USER = [{"role": "user", "content": "What is the weather in Paris? 日本"}]


def answering(run: Path, *, raw: bool = False, base: str | None = None) -> AnsweringModel:
    tuned = find_tuned(str(run), base=base)
    return load_answering(prepare_questions(tuned, trained_format(tuned, raw=raw)), torch.device("cpu"))


def text_of(reply: Reply) -> str:
    assert "".join(reply) == reply.text
    return reply.text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    return toy_run(folder / "run", toy_chat_llama(folder / "base"))


@pytest.fixture(scope="module")
def model(run: Path) -> AnsweringModel:
    return answering(run)


@pytest.fixture(scope="module")
def plain(run: Path) -> dict[SideName, Any]:
    """The same two by transformers and PEFT alone."""
    base = run.parent / "base"
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run / "final")
    return {"base": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), "tuned": tuned}


def generated(model: Any, base: Path, tokens: int, ends: list[int], **choice: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = model.generate(
        **ids, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=0, **{"do_sample": False, **choice}
    )
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("side", SIDES)
def test_a_greedy_answer_is_that_of_generate(side: SideName, model: AnsweringModel, plain: dict, run: Path) -> None:
    ends = sorted(model.questions.sides[side].ends)
    wanted = generated(plain[side], run.parent / "base", 40, ends)
    assert text_of(model.reply(USER, side, Sampling(), 40)).replace("\ufffd", "") == wanted.replace("\ufffd", "")
    assert len(wanted) > 20


def test_sides_that_take_turns_do_not_disturb_each_other(model: AnsweringModel) -> None:
    alone = {side: text_of(model.reply(USER, side, Sampling(), 24)) for side in SIDES}
    together = [model.reply(USER, side, Sampling(), 24) for side in SIDES]
    order = [reply.side.name for reply, _ in interleaved(together)]
    assert {reply.side.name: reply.text for reply in together} == alone and alone["base"] != alone["tuned"]
    assert order[:4] == ["base", "tuned", "base", "tuned"]


def test_sampling_draws_what_its_seed_says_and_transformers_processors_allow(model: AnsweringModel) -> None:
    def drawn(**choice: Any) -> str:
        return text_of(model.reply(USER, "tuned", Sampling(**choice), 24))

    assert drawn(temperature=1.0, seed=1) == drawn(temperature=1.0, seed=1) != drawn(temperature=1.0, seed=2)
    greedy = text_of(model.reply(USER, "tuned", Sampling(), 24))
    assert drawn(temperature=1.0, top_p=1e-6, seed=3) == drawn(temperature=1e-4, seed=4) == greedy
    assert drawn(temperature=1.0, seed=1) != greedy


def ids_of(model: AnsweringModel, side: SideName, tokens: int) -> list[int]:
    reply = model.reply(USER, side, Sampling(), tokens)
    return [reply.decoder.next() for _ in range(tokens)]


def copied(run: Path, to: Path) -> Path:
    """A run of the same base in files of its own, to be changed."""
    shutil.copytree(run.parent / "base", to / "base")
    shutil.copytree(run, to / "run")
    config = (to / "run" / "config.yaml").read_text().replace(str(run.parent / "base"), str(to / "base"))
    (to / "run" / "config.yaml").write_text(config)
    return to / "run"


def test_it_stops_at_every_end_that_the_model_names_in_its_generation_config(
    model: AnsweringModel, run: Path, tmp_path: Path
) -> None:
    ids = ids_of(model, "tuned", 12)
    end = next(token for n, token in enumerate(ids) if n > 2 and token not in ids[:n])
    mine = copied(run, tmp_path)
    settings = {"eos_token_id": [2, end], "temperature": 0.6, "repetition_penalty": 1.3, "do_sample": True}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    changed = answering(mine)
    reply = changed.reply(USER, "tuned", Sampling(), 40)
    whole = model.questions.sides["tuned"].tokenizer.decode(ids[: ids.index(end)], skip_special_tokens=True)
    assert text_of(reply) == whole.replace("\ufffd", "").strip() or "\ufffd" in whole
    assert (reply.ended, reply.tokens) == ("end", ids.index(end)), "and neither penalty nor temperature is applied"
    assert changed.questions.ignored == {"temperature": 0.6, "repetition_penalty": 1.3, "do_sample": True}


def test_the_ends_are_the_tokenizers_the_models_and_the_templates(model: AnsweringModel) -> None:
    tokenizer = model.questions.sides["tuned"].tokenizer
    ends = tokenizer.convert_ids_to_tokens(sorted(model.questions.sides["tuned"].ends))
    assert ends == ["<|im_end|>"] and "<|endoftext|>" in tokenizer.get_vocab()  # which is an end by its name alone
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "as SmolLM2 has it"


def test_an_end_of_turn_that_is_no_end_token_of_the_tokenizer_ends_an_answer(run: Path, tmp_path: Path) -> None:
    mine = copied(run, tmp_path)
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_start|>' }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(
        template + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    text = (mine / "config.yaml").read_text().replace("data:\n", f"data:\n  chat_template: {tmp_path}/t.jinja\n")
    (mine / "config.yaml").write_text(text)
    tuned = find_tuned(str(mine))
    side = prepare_questions(tuned, trained_format(tuned)).sides["tuned"]
    assert side.tokenizer.convert_tokens_to_ids("<|im_start|>") in side.ends


def test_an_end_of_turn_that_is_no_token_ends_an_answer_too_and_is_not_shown(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = copied(run, tmp_path)
    template = "{% for m in messages %}{{ '## ' + m.role + '\n' + m.content + '[/END]\n' }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template + "{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}")
    text = (mine / "config.yaml").read_text().replace("data:\n", f"data:\n  chat_template: {tmp_path}/t.jinja\n")
    (mine / "config.yaml").write_text(text)
    changed = answering(mine)
    reply = changed.reply(USER, "tuned", Sampling(), 40)
    spelt = iter(changed.questions.sides["tuned"].tokenizer("Sunny, 日本.[/END]\n## user")["input_ids"])
    monkeypatch.setattr(Decoder, "next", lambda self: next(spelt))
    assert text_of(reply) == "Sunny, 日本." and reply.ended == "end"


def test_without_a_generation_config_the_models_own_ends_count(run: Path, tmp_path: Path) -> None:
    mine = copied(run, tmp_path)
    (tmp_path / "base" / "generation_config.json").unlink()
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [1, 77]}))
    tuned = find_tuned(str(mine))
    assert 77 in prepare_questions(tuned, trained_format(tuned)).sides["base"].ends


def test_what_does_not_fit_the_models_positions_is_refused_or_shortened(model: AnsweringModel) -> None:
    assert model.questions.positions == 256
    asked = len(model.questions.format.encode(USER).ids)
    assert model.reply(USER, "tuned", Sampling()).limit == 256 - asked, "the default gives way"
    assert model.reply(USER, "tuned", Sampling(), 256).limit == 256 - asked, "as does what was asked for"
    assert model.reply(USER, "tuned", Sampling(), 256).fills_model
    assert not model.reply(USER, "tuned", Sampling(), 9).fills_model
    with pytest.raises(UserInputError, match="made for 256"):
        model.reply([{"role": "user", "content": "long " * 300}], "tuned", Sampling())
    assert room_for(10, None, None) == 512 and room_for(10, 1000, 1010) == 1000


def test_an_answer_can_be_stopped_between_two_tokens(model: AnsweringModel) -> None:
    asked: list[bool] = []
    reply = model.reply(USER, "tuned", Sampling(), 40, stopped=lambda: len(asked) >= 5 or bool(asked.append(True)))
    text_of(reply)
    assert (reply.ended, reply.tokens) == ("stopped", 5)


def test_an_empty_prompt_is_refused(model: AnsweringModel) -> None:
    tuned = find_tuned(str(model.questions.tuned.adapter))
    raw = AnsweringModel(model.loaded, prepare_questions(tuned, trained_format(tuned, raw=True)))
    with pytest.raises(UserInputError, match="empty"):
        raw.reply([{"role": "user", "content": " "}], "tuned", Sampling())


def test_raw_continues_the_text_to_the_character(model: AnsweringModel, plain: dict, run: Path) -> None:
    tuned = find_tuned(str(run))
    raw = AnsweringModel(model.loaded, prepare_questions(tuned, trained_format(tuned, raw=True)))
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "base")
    ids = tokenizer("the answer", return_tensors="pt")
    out = plain["tuned"].generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    reply = raw.reply([{"role": "user", "content": "the answer"}], "tuned", Sampling(), 24)
    assert reply.prompt.ids == ids["input_ids"][0].tolist()
    assert text_of(reply) == wanted.rstrip("\ufffd") or reply.ended == "end"


def test_a_model_that_computes_nan_says_so(run: Path) -> None:
    broken = answering(run)
    with torch.no_grad():
        broken.loaded.model.get_base_model().model.norm.weight.fill_(float("nan"))
    with pytest.raises(MachineError, match="NaN"):
        list(broken.reply(USER, "tuned", Sampling(), 4))


@pytest.fixture(scope="module")
def with_new_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that learnt a token which the base has no row for."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("new-token")
    base = toy_chat_llama(folder / "base")
    run = toy_run(folder / "run", base)
    shutil.rmtree(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|tool|>"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = {"embed_tokens": [len(tokenizer) - 1], "lm_head": [len(tokenizer) - 1]}
    adapted = get_peft_model(
        model, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=rows)
    )
    adapted.save_pretrained(run / "final", save_embedding_layers=False)
    tokenizer.save_pretrained(run / "final")
    text = (run / "config.yaml").read_text().replace("model:\n", 'model:\n  new_tokens: ["<|tool|>"]\n')
    (run / "config.yaml").write_text(text)
    return run


def test_the_base_is_asked_in_its_own_tokens_and_never_answers_with_those_it_lacks(with_new_token: Path) -> None:
    model = answering(with_new_token)
    messages = [{"role": "user", "content": "a <|tool|> b"}]
    ids = {side: model.reply(messages, side, Sampling(), 8).prompt.ids for side in SIDES}
    rows = model.loaded.stored_rows
    assert max(ids["tuned"]) == rows > max(ids["base"])
    reply = model.reply(messages, "base", Sampling(temperature=10.0, seed=1), 60)
    assert max(reply.decoder.next() for _ in range(60)) < rows
