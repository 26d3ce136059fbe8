from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.quickstart import score as scoring
from shardtune.quickstart.recipe import PROMPT
from shardtune.quickstart.score import Score, comparison, is_lost, judged, parsed, samples, score
from shardtune.quickstart.sentences import rows
from shardtune.quickstart.weights import tiny_model

GOOD = '{"intent":"set_timer","slots":{"duration":"5 minutes"}}'


@pytest.mark.parametrize("text", [GOOD, f" {GOOD}\n", '{"slots":{},"intent":"x"}'])
def test_valid_is_an_object_with_a_string_intent_and_an_object_of_slots(text: str) -> None:
    assert parsed(text) is not None


@pytest.mark.parametrize(
    "text",
    ["", "Sure!", f"Sure! {GOOD}", f"{GOOD} Anything else?", GOOD[:-1], "[]", "3", "null", '{"intent":"x"}', '{"slots":{}}',
     '{"intent":1,"slots":{}}', '{"intent":"x","slots":[]}', '{"intent":"x","slots":"y"}', "[" * 100_000],
)  # fmt: skip
def test_everything_else_is_not_valid(text: str) -> None:
    assert parsed(text) is None


@pytest.mark.parametrize("text", ["Sure", f"{GOOD} and", f"{GOOD}{{", '"intent"', "[{"])
def test_an_answer_is_lost_when_no_continuation_can_save_it(text: str) -> None:
    assert is_lost(text)


@pytest.mark.parametrize("text", ["", " ", "{", GOOD, GOOD + " ", GOOD[:20], '{"intent":"a } b'])
def test_an_answer_that_may_still_become_valid_is_not_lost(text: str) -> None:
    assert not is_lost(text)


def test_intent_and_exact_match_are_judged_on_the_object_not_on_the_text() -> None:
    expected = '{"intent":"get_weather","slots":{"place":"Porto","day":"Sunday"}}'
    other_order = '{"slots": {"day": "Sunday", "place": "Porto"}, "intent": "get_weather"}'
    assert judged("s", expected, other_order).exact
    missing = judged("s", expected, '{"intent":"get_weather","slots":{"place":"Porto"}}')
    assert (missing.valid, missing.intent, missing.exact) == (True, True, False)
    wrong = judged("s", expected, '{"intent":"set_timer","slots":{}}')
    assert (wrong.valid, wrong.intent, wrong.exact) == (True, False, False)
    broken = judged("s", expected, expected[:-1])
    assert (broken.valid, broken.intent, broken.exact) == (False, False, False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_the_tiny_model_scores_nothing_and_the_score_can_be_written_as_json(tiny: tuple[Any, Any]) -> None:
    test_rows = rows("test", 10, 0)
    result = score(*tiny, test_rows, batch_size=4, max_new_tokens=12)
    assert (result.rows, result.valid_json, result.intent, result.exact_match) == (10, 0, 0, 0)
    assert result.eval_loss > 3
    assert [a.sentence for a in result.answers] == [r["sentence"] for r in test_rows]
    assert json.loads(json.dumps(result.as_dict()))["answers"][0]["expected"] == test_rows[0]["json"]


def test_the_loss_is_the_mean_over_answer_tokens_whatever_the_batch_size(tiny: tuple[Any, Any]) -> None:
    import torch

    model, tokenizer = tiny
    test_rows = rows("test", 7, 1)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in test_rows:  # one row at a time, no padding: the definition
            prompt = tokenizer(PROMPT.format(sentence=row["sentence"]))["input_ids"]
            target = [*tokenizer(row["json"])["input_ids"], tokenizer.eos_token_id]
            logits = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum"))
            count += len(target)
    for batch_size in (1, 3, 7):
        result = score(model, tokenizer, test_rows, batch_size=batch_size, max_new_tokens=1)
        assert result.eval_loss == pytest.approx(total / count, rel=1e-5)


def test_batched_answers_are_those_of_one_row_at_a_time(tiny: tuple[Any, Any]) -> None:
    test_rows = rows("test", 6, 2)
    alone = score(*tiny, test_rows, batch_size=1, max_new_tokens=10)
    together = score(*tiny, test_rows, batch_size=6, max_new_tokens=10)
    assert [a.text for a in together.answers] == [a.text for a in alone.answers]


def test_a_model_that_has_learned_one_row_scores_full_marks_on_it_and_stops_at_the_end_token(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(tmp_path, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    row = rows("train", 1, 0)
    prompt = tokenizer(PROMPT.format(sentence=row[0]["sentence"]))["input_ids"]
    ids = torch.tensor([[*prompt, *tokenizer(row[0]["json"])["input_ids"], tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.train()
    result = score(model, tokenizer, row, batch_size=1, max_new_tokens=64)
    assert model.training, "score leaves the model's mode as it found it"
    assert (result.valid_json, result.intent, result.exact_match) == (1, 1, 1)
    assert result.answers[0].text == row[0]["json"]
    assert result.eval_loss < 0.5


def test_a_rambling_answer_is_cut_once_it_is_lost(tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny
    monkeypatch.setattr(scoring, "_SHOWN_TOKENS", 4)
    steps: list[int] = []
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    result = score(model, tokenizer, rows("test", 4, 0), batch_size=4, max_new_tokens=40)
    assert all(is_lost(a.text) for a in result.answers)
    assert len(steps) <= 1 + 8


def test_scoring_nothing_is_an_error(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        score(*tiny, [])


def _two_scores() -> tuple[Score, Score]:
    test_rows = rows("test", 16, 0)
    talk = "I'm sorry for [any] confusion.\nI'm here to help with any questions or problems you're facing."
    before = scoring._counted(tuple(judged(r["sentence"], r["json"], talk) for r in test_rows), 3.5)
    texts = [r["json"] if i else '{"intent":"x","slots":{}}' for i, r in enumerate(test_rows)]
    after = scoring._counted(
        tuple(judged(r["sentence"], r["json"], t) for r, t in zip(test_rows, texts, strict=True)), 0.0712
    )
    return before, after


def test_samples_have_three_different_intents_and_are_not_picked_for_success() -> None:
    before, after = _two_scores()
    pairs = samples(before, after)
    assert len({json.loads(first.expected)["intent"] for first, _ in pairs}) == 3
    assert pairs[0][1] is after.answers[0], "the first row is shown although its answer is wrong"
    assert all(first.sentence == second.sentence for first, second in pairs)


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison_fits_the_terminal_and_shows_numbers_and_answers(width: int) -> None:
    from rich.console import Console

    before, after = _two_scores()
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(comparison(before, after))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "16 held-out sentences" in text
    for label, values in {
        "test loss": ("3.50", "0.07"), "valid JSON": ("0%", "100%"), "right intent": ("0%", "94%"), "exact match": ("0%", "94%"),
    }.items():  # fmt: skip
        line = next(line for line in text.splitlines() if label in line)
        assert line.split()[-2:] == list(values)
    assert text.count("I'm sorry for [any]") == 3, "brackets in an answer are no markup"
    assert all(f"“{first.sentence}”" in text for first, _ in samples(before, after))
    assert text.count("expected") == 3
    assert text.count("the same") == 2
