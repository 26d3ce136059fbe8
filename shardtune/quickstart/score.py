"""How good are the answers? Held-out sentences are put to a model before and after training, and counted.

How each number is counted, over the test rows:

- test loss: mean negative log-likelihood per token of the expected answer and its end token, given the sentence.
- valid JSON: the whole answer parses to an object with a string `intent` and an object `slots`.
- intent: valid, and the intent is the expected one.
- exact match: valid, and the object equals the expected one, every slot included (key order does not matter).

Answers are greedy. A row ends at the end token, at the cap, or once it can no longer become valid, which is what makes
an untrained model, which likes to talk, cheap to score.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardtune.evaluation.json_fields import parsed as json_value
from shardtune.quickstart.recipe import PROMPT

if TYPE_CHECKING:
    import torch
    from rich.console import Console, ConsoleOptions, RenderResult

SCORE_NAMES = {"valid_json": "valid JSON", "intent": "right intent", "exact_match": "exact match"}
_SHOWN_TOKENS = 24  # of an answer that is no JSON: enough to see what it is


@dataclass(frozen=True)
class Answer:
    """One test row: what was asked, what should come, what came."""

    sentence: str
    expected: str
    text: str
    valid: bool
    intent: bool
    exact: bool


@dataclass(frozen=True)
class Score:
    """What a model does on the test rows. Shares are from 0 to 1."""

    rows: int
    eval_loss: float
    valid_json: float
    intent: float
    exact_match: float
    answers: tuple[Answer, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for json.dumps."""
        return {**asdict(self), "answers": [asdict(answer) for answer in self.answers]}


def parsed(text: str) -> dict[str, Any] | None:
    """The answer as an object, or None when it is not valid (see the module's rules).

    Example:
        >>> parsed('{"intent":"set_timer","slots":{}}')
        {'intent': 'set_timer', 'slots': {}}
        >>> parsed('Sure! {"intent":"set_timer","slots":{}}') is None
        True
    """
    value = json_value(text)
    if not isinstance(value, dict):
        return None
    return value if isinstance(value.get("intent"), str) and isinstance(value.get("slots"), dict) else None


def is_lost(text: str) -> bool:
    """Whether no continuation can make `text` valid: it does not open with `{`, or goes on after the object closed."""
    text = text.lstrip()
    if not text.startswith("{"):
        return bool(text)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False  # not closed yet (or broken inside, which the cap will end)
    return bool(text[end:].strip())


def judged(sentence: str, expected: str, text: str) -> Answer:
    """Compare one answer with the expected one."""
    value, wanted = parsed(text), json.loads(expected)
    same_intent = value is not None and value["intent"] == wanted["intent"]
    return Answer(sentence, expected, text, value is not None, same_intent, value == wanted)


def score(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, str]], *, batch_size: int = 16, max_new_tokens: int = 64
) -> Score:
    """Put every row to a plain model (not sharded, one process) and count.

    Args:
        model: A causal language model of transformers, or a PEFT model (merged ones are about a third faster).
        tokenizer: Its tokenizer; `eos_token_id` ends an answer.
        rows: Rows with `sentence` and `json`, as `sentences.rows` makes them.
        batch_size: Rows at a time.
        max_new_tokens: Longest answer. The longest expected one has about 60 tokens with SmolLM2's tokenizer.

    Returns:
        The score; its answers stand in the order of `rows`.

    Raises:
        ValueError: When there are no rows.
    """
    if not rows:
        raise ValueError("score needs at least one row")
    import torch

    prompts = [tokenizer(PROMPT.format(sentence=r["sentence"]), add_special_tokens=False)["input_ids"] for r in rows]
    targets = [[*tokenizer(r["json"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for r in rows]
    texts = [""] * len(rows)
    loss_sum = 0.0
    # Rows of like length together: less padding, and no short answer waits for a long one.
    order = sorted(range(len(rows)), key=lambda i: len(targets[i]))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            loss_sum += _loss_sum(model, [prompts[i] for i in batch], [targets[i] for i in batch])
            answers = _generate(model, tokenizer, [prompts[i] for i in batch], max_new_tokens)
            for i, text in zip(batch, answers, strict=True):
                texts[i] = text
    model.train(was_training)
    judgements = tuple(judged(row["sentence"], row["json"], text) for row, text in zip(rows, texts, strict=True))
    return _counted(judgements, loss_sum / sum(map(len, targets)))


def _counted(answers: tuple[Answer, ...], eval_loss: float) -> Score:
    n = len(answers)
    return Score(
        rows=n,
        eval_loss=eval_loss,
        valid_json=sum(a.valid for a in answers) / n,
        intent=sum(a.intent for a in answers) / n,
        exact_match=sum(a.exact for a in answers) / n,
        answers=answers,
    )


def _left_padded(sequences: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [rows, longest]. Pad and end token may be the same id: only the mask tells."""
    import torch

    longest = max(map(len, sequences))
    ids = torch.tensor([[0] * (longest - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask


def _loss_sum(model: Any, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> float:
    """Summed negative log-likelihood of the target tokens."""
    import torch

    ids, mask = _left_padded([[*p, *t] for p, t in zip(prompts, targets, strict=True)], model.device)
    longest = max(map(len, targets))
    # Left padding puts all targets at the end, so the output head (a fifth of the model) runs on those places only.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=longest + 1
    )
    logits = output.logits[:, :-1].float()  # [rows, longest, vocabulary]: the place before each target token
    labels = ids[:, -longest:].clone()
    for row, target in enumerate(targets):
        labels[row, : longest - len(target)] = -100
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return float(loss)


def _generate(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
    import torch
    from transformers import StoppingCriteria

    from shardtune.evaluation.answers import greedy_answers

    class Lost(StoppingCriteria):
        """Per row: stop once the answer is lost, but not before there is something to show."""

        def __init__(self, prompt_length: int) -> None:
            self.prompt_length = prompt_length

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            new = input_ids[:, self.prompt_length :]
            if (
                new.shape[1] < _SHOWN_TOKENS or new.shape[1] % 4
            ):  # decoding at every token would cost more than it saves
                return torch.zeros(len(new), dtype=torch.bool, device=new.device)
            texts = tokenizer.batch_decode(new, skip_special_tokens=True)
            return torch.tensor([is_lost(text) for text in texts], device=new.device)

    answers = greedy_answers(
        model, prompts, max_new_tokens=max_new_tokens, ends=[tokenizer.eos_token_id], batch_size=len(prompts),
        stopping=Lost,
    )  # fmt: skip
    return [tokenizer.decode(list(answer.ids), skip_special_tokens=True).strip() for answer in answers]


def comparison(before: Score, after: Score) -> Comparison:
    """Before and after as something rich can print, laid out for the width it is given (good from 80 columns)."""
    return Comparison(before, after)


def samples(before: Score, after: Score, n: int = 3) -> list[tuple[Answer, Answer]]:
    """The first `n` rows whose intents differ, before and after: a fixed choice, not the best ones."""
    chosen: dict[str, tuple[Answer, Answer]] = {}
    for pair in zip(before.answers, after.answers, strict=True):
        chosen.setdefault(json.loads(pair[0].expected)["intent"], pair)
    return list(chosen.values())[:n]


@dataclass(frozen=True)
class Comparison:
    """A table of the four numbers, then sample answers side by side."""

    before: Score
    after: Score

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _numbers(self.before, self.after)
        for first, second in samples(self.before, self.after):
            yield ""
            yield _sample(first, second, options.max_width)


def _numbers(before: Score, after: Score) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{after.rows} held-out sentences", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 2))
    table.add_column("")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", style="bold green" if heading == "after" else "")
    table.add_row("test loss", f"{before.eval_loss:.2f}", f"{after.eval_loss:.2f}")
    for name, label in SCORE_NAMES.items():
        table.add_row(label, f"{getattr(before, name):.0%}", f"{getattr(after, name):.0%}")
    return table


def _sample(before: Answer, after: Answer, width: int) -> Any:
    """One sentence and its answers: three columns where there is room for them, else the expected answer below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    wide = width >= 110
    table = Table(
        title=Text(f"“{before.sentence}”", style="bold"), title_justify="left", box=box.ROUNDED, width=min(width, 132)
    )
    for heading in ("before", "after", "expected")[: 3 if wide else 2]:
        table.add_column(heading, ratio=1, overflow="fold")
    expected = Text("the same", style="dim") if after.exact else _pretty(after.expected)
    answers = [_pretty(before.text), _pretty(after.text)]
    answers[1].stylize("green" if after.exact else "yellow")
    table.add_row(*answers, *([expected] if wide else []))
    if not wide:
        table.add_section()
        table.add_row(Text("expected", style="bold"), expected)
    return table


def _pretty(text: str) -> Any:
    """A valid answer laid out with one slot a line; any other as it came, in one paragraph and not too long."""
    from rich.text import Text

    value = parsed(text)
    if value is None or len(value) > 2:
        line = " ".join(text.split())
        return Text(line if len(line) <= 160 else line[:159] + "…")
    slots = ",\n".join(f"  {_quoted(name)}: {_quoted(slot)}" for name, slot in value["slots"].items())
    break_before = "\n" if slots else ""
    return Text(f'{{"intent": {_quoted(value["intent"])},\n "slots": {{{break_before}{slots}}}}}')


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
