"""Answers before and after: which rows are asked, that the right thing is generated, and that training does not notice."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_prepared import FakePrepared
from interrupted import final_weights, lines, run
from rich.console import Console
from running import Command, events
from toys import toy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.data.collate import Collator
from shardtune.data.tokens import IGNORED
from shardtune.observe.samples import SampleAnswer, show_samples
from shardtune.train.samples import Question, greedy, logged_answers, next_tokens, questions

ALONE: Any = SimpleNamespace(world_size=1)
CPU = torch.device("cpu")


def always() -> bool:
    return True


# --- which rows, and what of them ------------------------------------------------------------------------------------


def test_a_row_is_asked_up_to_its_first_supervised_token() -> None:
    prepared = FakePrepared([([1, 11, 12, 13, 2], 3), ([1, 21, 2], 2), ([1, 31, 32, 2], 2), ([1, 41, 2], 1)])
    assert questions(prepared, "validation", 2, 64, bos=None) == [  # type: ignore[arg-type]
        Question("validation:0", (1, 11, 12), (13, 2)),
        Question("validation:2", (1, 31), (32, 2)),
    ]
    assert questions(prepared, "train", 0, 64, bos=None) == []  # type: ignore[arg-type]
    assert len(questions(prepared, "train", 99, 64, bos=None)) == 4  # type: ignore[arg-type]


def test_of_a_conversation_the_first_answer_is_expected() -> None:
    prepared = FakePrepared([([1, 5, 6, 7, 8, 9], 2)])
    prepared._rows[0][1][4] = IGNORED  # the next question
    (question,) = questions(prepared, "train", 1, 64, bos=1)  # type: ignore[arg-type]
    assert (question.prompt, question.expected) == ((1, 5), (6, 7))


@pytest.mark.parametrize("masked", [0, 1])  # all of it, or all but the token that begins every row
def test_a_plain_text_is_continued_from_its_middle(masked: int) -> None:
    prepared = FakePrepared([([1, 3, 4, 5, 6, 7, 8, 9], masked)])
    (question,) = questions(prepared, "train", 1, 3, bos=1)  # type: ignore[arg-type]
    assert (question.prompt, question.expected) == ((1, 3, 4, 5), (6, 7, 8))


# --- generating ------------------------------------------------------------------------------------------------------


def counting(asked: list[list[list[int]]]) -> Callable[[list[list[int]]], list[int]]:
    """A model that says the number after the last one."""

    def next_of(rows: list[list[int]]) -> list[int]:
        asked.append([list(row) for row in rows])
        return [row[-1] + 1 for row in rows]

    return next_of


def test_an_answer_ends_at_an_end_token_or_at_the_cap_and_ended_ones_are_not_computed_on() -> None:
    asked: list[list[list[int]]] = []
    assert greedy(counting(asked), [[5], [1, 2]], 4, {7}, ALONE, always) == [[6], [3, 4, 5, 6]]
    assert [len(rows) for rows in asked] == [2, 2, 1, 1]
    asked.clear()
    assert greedy(counting(asked), [[6], [6]], 40, {7}, ALONE, always) == [[], []]
    assert len(asked) == 1


def test_a_run_that_is_to_stop_gives_no_answers() -> None:
    left = iter([True, True, False])
    assert greedy(counting([]), [[1]], 40, {999}, ALONE, lambda: next(left)) is None


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_the_next_tokens_are_those_transformers_generates(toy_model: Path, layout: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = [[1, 10, 20, 30], [1, 44], [1, 9, 8, 7, 6, 5, 4]]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, min_new_tokens=9,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        wanted.append(made[0, len(prompt) :].tolist())
    before = torch.get_rng_state()
    said = greedy(lambda rows: next_tokens(model, Collator(0, layout), rows, CPU), prompts, 9, set(), ALONE, always)
    assert said == wanted
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_gives_all_its_logits_is_read_at_the_same_places(toy_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32).eval()

    def deaf(logits_to_keep: Any, **inputs: Any) -> Any:
        return model(**inputs)

    rows = [[1, 10, 20, 30], [1, 44]]
    assert next_tokens(deaf, Collator(0, "padded"), rows, CPU) == next_tokens(model, Collator(0, "padded"), rows, CPU)  # type: ignore[arg-type]


# --- in a run --------------------------------------------------------------------------------------------------------

TRAIN: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_steps": 3}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("samples"), toy_model, toy_data,
        data={"val_split": "validation"}, lora={"lora_dropout": 0.3}, train=TRAIN,
    )  # fmt: skip


ASKED = ("train.samples=3", "train.sample_tokens=5", "train.per_device_eval_batch_size=2")


@pytest.fixture(scope="module")
def asked(config: Path) -> Path:
    assert run(config, *ASKED, run_id="asked") == 0
    return config.parent / "runs" / "asked"


def test_training_does_not_notice_that_its_model_was_asked(config: Path, asked: Path) -> None:
    assert run(config, run_id="plain") == 0
    plain = config.parent / "runs" / "plain"
    assert lines(asked) == lines(plain) and final_weights(asked) == final_weights(plain)
    assert events(plain, "sample") == []


def test_the_answers_are_those_of_the_model_before_and_of_the_adapter_after(asked: Path, toy_model: Path) -> None:
    from peft import PeftModel

    said = events(asked, "sample")
    assert [(event["when"], event["row"]) for event in said] == [
        (when, row) for when in ("before", "after") for row in ("validation:0", "validation:4", "validation:8")
    ]
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    models = {"before": AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)}
    adapted = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    models["after"] = PeftModel.from_pretrained(adapted, asked / "final")
    for event in said:
        ids = tokenizer(event["prompt"], return_tensors="pt", add_special_tokens=False)
        made = models[event["when"]].eval().generate(
            input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], do_sample=False, max_new_tokens=5
        )  # fmt: skip
        answer = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert event["answer"] == answer
        question, _, _ = event["prompt"].partition(" =>")
        assert event["expected"].split() == question.split()[::-1][:5]


def test_a_run_that_goes_on_asks_only_after_and_ends_with_the_same_answers(
    config: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, *ASKED, run_id="resumed", stop_at=3) == 75
    resumed = config.parent / "runs" / "resumed"
    assert {event["when"] for event in events(resumed, "sample")} == {"before"}
    capsys.readouterr()
    assert run(config, *ASKED, run_id="resumed") == 0
    assert [(e["when"], e["row"], e["answer"]) for e in events(resumed, "sample")] == [
        (e["when"], e["row"], e["answer"]) for e in events(asked, "sample")
    ]
    assert lines(resumed) == lines(asked) and final_weights(resumed) == final_weights(asked)
    shown = capsys.readouterr().out
    assert shown.count("before    ") == 3 and shown.count("after     ") == 3  # those from before, out of the events


def test_a_base_held_in_fp8_is_asked_as_it_trains(config: Path) -> None:
    assert run(config, *ASKED, "model.base_precision=fp8", "data.val_split=null", run_id="fp8") == 0
    said = events(config.parent / "runs" / "fp8", "sample")
    assert [event["row"] for event in said] == ["train:0", "train:16", "train:33"] * 2
    assert all(event["answer"] for event in said)


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(config: Path, asked: Path, shardtune: Command) -> None:
    more = [word for text in ASKED for word in ("-o", text)]
    for name, words in (("two", more), ("two-plain", [])):
        done = shardtune(
            "train", config, "--nproc", 2, "--run-id", name, "-o", "train.per_device_train_batch_size=1", *words
        )
        assert done.returncode == 0, done.stderr
    two, plain = config.parent / "runs" / "two", config.parent / "runs" / "two-plain"
    assert lines(two) == lines(plain) and final_weights(two) == final_weights(plain)
    before = {e["row"]: e["answer"] for e in events(asked, "sample") if e["when"] == "before"}
    assert {e["row"]: e["answer"] for e in events(two, "sample") if e["when"] == "before"} == before
    assert len(events(two, "sample")) == 6 and events(two, "sample", rank=1) == []


# --- showing ---------------------------------------------------------------------------------------------------------


def test_lines_of_a_log_become_pairs_and_a_torn_line_is_passed_over() -> None:
    log = [
        '{"event": "sample", "when": "before", "row": "train:1", "prompt": "p", "answer": "a", "expected": "e"}',
        '{"event": "step", "step": 1}',
        '{"event": "sample", "when": "after", "row": "train:1", "prompt": "p", "answer": "b", "expected": "e"}',
        '{"event": "sample", "when": "after", "row": "train:2", "prompt": "q", "answer": "c", "expected": "f"}',
        '{"event": "sample", "when": "aft',
    ]
    assert logged_answers(log) == [
        SampleAnswer("train:1", "p", "a", "b", "e"),
        SampleAnswer("train:2", "q", None, "c", "f"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_sample_takes_four_lines_of_any_width(width: int) -> None:
    sample = SampleAnswer("train:1", "x" * 200 + " the\nend", "y" * 300, "[b]right", "[b]right")
    console = Console(file=StringIO(), width=width)
    show_samples(console, [sample] * 5)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(shown) == 3 * 4 + 1 and all(len(line.rstrip()) <= width for line in shown)
    assert shown[0].startswith("sample    train:1  …xxx") and shown[0].rstrip().endswith("the end")
    assert shown[1].startswith("before    yyy") and shown[1].rstrip().endswith("y…")
    assert shown[2].rstrip() == "after     [b]right" and shown[3].rstrip() == "expected  [b]right"
    assert "2 more samples" in shown[-1]
