"""How does an evaluation go, from top to bottom? Rows → model → losses → answers → tasks → metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from shardtune import terminal
from shardtune.checkpoint.final import source_of_adapter, weights_sha256
from shardtune.config.notices import template_notices
from shardtune.data.checks import model_positions
from shardtune.data.inspect import counts_line
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.evaluation.answers import Answer, greedy_answers
from shardtune.evaluation.intervals import RESAMPLES, SEED
from shardtune.evaluation.json_fields import parsed
from shardtune.evaluation.likelihood import row_losses
from shardtune.evaluation.metrics import (
    ChosenMetrics,
    Metric,
    Side,
    choose_metrics,
    field_counts,
    is_exact,
    json_metrics,
    parse_metrics,
    perplexity,
    shares,
)
from shardtune.evaluation.progress import EvaluationProgress
from shardtune.evaluation.result import Evaluation
from shardtune.evaluation.rows import DataChoice, Rows, read_rows
from shardtune.evaluation.tasks import TaskChoice, TaskScore, run_tasks
from shardtune.inference.load import LoadedModel, load_tuned, load_tuned_tokenizer
from shardtune.model.load import model_folder
from shardtune.observe.preparing import PreparingProgress

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from shardtune.inference.source import TunedModel

_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
_BATCH_SIZE = {"cpu": 8, "cuda": 32}
_SHORTEST_LIMIT, _LONGEST_LIMIT = 16, 1024  # of the default for --max-new-tokens
_FEW = 30  # rows, below which a bootstrap's interval is rough


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        data: None: tasks alone.
        metrics: Names; None: all that make sense.
        max_new_tokens: None: half as much again as the longest expected answer.
        batch_size: Prompts that are answered together; None: by the device.
        with_base: Evaluate the base model too.
    """

    data: DataChoice | None
    tasks: TaskChoice | None
    metrics: str | None = None
    max_new_tokens: int | None = None
    batch_size: int | None = None
    with_base: bool = True

    @property
    def sides(self) -> tuple[Side, ...]:
        return ("base", "tuned") if self.with_base else ("tuned",)


@dataclass(frozen=True)
class _AnswerTexts:
    """The answers of a side, as text, and which of them the limit cut off."""

    texts: tuple[str, ...]
    cut: int


@dataclass(frozen=True)
class _Weights:
    """Which weights are evaluated: `final/` may be another checkpoint's tomorrow."""

    step: int | None
    sha256: str

    @classmethod
    def of(cls, tuned: TunedModel) -> _Weights:
        source = source_of_adapter(tuned.run, tuned.adapter, tuned.step)
        return cls(source.step if source is not None else None, weights_sha256(tuned.adapter))


def evaluate(tuned: TunedModel, request: Request, console: Console, device: torch.device | None = None) -> Evaluation:
    """Evaluate the tuned model, and its base, in this process.

    Rows and metrics come first, so that what makes no sense is refused before any weight is read.

    Args:
        device: None: the first GPU, or the CPU where there is none.

    Raises:
        UserInputError: data or model are not there or do not fit, or a metric makes no sense for them.
    """
    began = time.time()
    rows = chosen = None
    expected: list[str] = []
    if request.metrics is not None:
        parse_metrics(request.metrics)  # a typo is known before any row is read
    if request.data is not None:
        tokenizer = load_tuned_tokenizer(tuned, model_folder(tuned.base))
        given = request.data.data is not None or request.data.split is not None
        with PreparingProgress(console, labels={"train": "rows"} if given else {}) as progress:
            rows = read_rows(tuned, request.data, tokenizer, progress=progress)
        expected = [_answer_text(tokenizer, rows, question.expected) for question in rows.questions]
        chosen = choose_metrics(request.metrics, rows.no_answers, expected)
        if any(text.strip().startswith("data.prompt_template=") for text in request.data.overrides):
            for text in template_notices(rows.section.prompt_template):
                terminal.say(console, "notice", text, "yellow")
        _say_rows(console, rows, chosen)
    weights = _Weights.of(tuned)
    loaded = load_tuned(tuned, device)
    _say_model(console, loaded)
    if rows is not None and request.with_base:
        _refuse_unknown_tokens(loaded, rows)
    if request.tasks is not None and request.with_base and _vocabulary(loaded, "base") < _vocabulary(loaded, "tuned"):
        raise UserInputError(
            "--tasks cannot compare with the base model: the adapter brings tokens that it does not have.",
            why="The harness would count them among the base's possible answers (model.new_tokens).",
            fix="Evaluate the tuned model alone: --no-base.",
        )
    metrics: list[Metric] = []
    losses: dict[Side, NDArray[np.float64]] = {}
    said: dict[Side, _AnswerTexts] = {}
    limit = None
    with EvaluationProgress(console) as shown, _memory(loaded):
        if rows is not None and chosen is not None:
            if "perplexity" in chosen.groups:
                losses = _losses(loaded, rows, request, shown)
                metrics += perplexity(losses, rows.prepared.supervised[list(rows.chosen)].astype(np.int64))
            if chosen.need_answers:
                limit = _limit(loaded, rows, request)
                said = _answers(loaded, rows, request, limit, shown)
                texts = {side: answers.texts for side, answers in said.items()}
                if "exact_match" in chosen.groups:
                    hits = {side: list(map(is_exact, expected, texts[side])) for side in texts}
                    metrics.append(shares("exact_match", "exact match", hits))
                if "json" in chosen.groups:
                    metrics += json_metrics(expected, texts)
    tasks: list[TaskScore] = []
    if request.tasks is not None:
        size = _batch_size(loaded, request)
        with _memory(loaded, tasks_batch=size):
            tasks = run_tasks(loaded, request.tasks, request.sides, batch_size=size)
    return Evaluation(
        about=_metadata(loaded, weights, request, rows, limit, said, time.time() - began),
        metrics=tuple(metrics),
        tasks=tuple(tasks),
        left_out=dict(chosen.left_out) if chosen is not None else {},
        notes=(*([f"{tuned.notice}."] if tuned.notice else []), *_notes(rows, limit, said)),
        rows=tuple(_row_by_row(loaded.tokenizer, rows, losses, expected, said)) if rows is not None else (),
        began=began,
    )


def _losses(
    loaded: LoadedModel, rows: Rows, request: Request, shown: EvaluationProgress
) -> dict[Side, NDArray[np.float64]]:
    found: dict[Side, NDArray[np.float64]] = {}
    for side in request.sides:
        shown.begin(f"{side}: loss", len(rows.chosen))
        with loaded.side(tuned=side == "tuned") as model:
            found[side] = row_losses(
                model,
                rows.prepared,
                rows.chosen,
                loaded.tokenizer.pad_token_id,
                vocabulary=_vocabulary(loaded, side),
                batch_tokens=_BATCH_TOKENS[loaded.device.type],
                done=shown.advance,
            )
        broken = int((~np.isfinite(found[side])).sum())
        if broken:
            raise ShardtuneError(
                f"Loss of the {side} model is not finite on {broken:,} of {terminal.count(len(rows.chosen), 'row')}.",
                why="The model computes numbers that are not finite there.",
                fix="Check the adapter and the base model (--model); bfloat16 holds larger numbers than float16.",
                code="loss-nan",
            )
    return found


def _answers(
    loaded: LoadedModel, rows: Rows, request: Request, limit: int, shown: EvaluationProgress
) -> dict[Side, _AnswerTexts]:
    found: dict[Side, _AnswerTexts] = {}
    for side in request.sides:
        shown.begin(f"{side}: answers", len(rows.questions))
        with loaded.side(tuned=side == "tuned") as model:
            answers = greedy_answers(
                model,
                [question.prompt for question in rows.questions],
                max_new_tokens=limit,
                ends=rows.ends,
                never=range(_vocabulary(loaded, side), _vocabulary(loaded, "tuned")),
                batch_size=_batch_size(loaded, request),
                done=shown.advance,
            )
        found[side] = _AnswerTexts(
            tuple(_answer_text(loaded.tokenizer, rows, one.ids) for one in answers), _cut(answers)
        )
    return found


def _refuse_unknown_tokens(loaded: LoadedModel, rows: Rows) -> None:
    if rows.prepared.counts.largest_id >= loaded.stored_rows:
        raise UserInputError(
            "The base model cannot be evaluated on these rows: they have tokens that it does not know.",
            why=f"It has {loaded.stored_rows:,} tokens; those of model.new_tokens were learnt with the adapter.",
            fix="Evaluate the tuned model alone: --no-base.",
        )


@contextmanager
def _memory(loaded: LoadedModel, tasks_batch: int | None = None) -> Iterator[None]:
    """Batches of rows are halved until they fit, so what is raised is one row that does not; the harness's are not."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        what = "One row alone does not fit into the GPU's memory beside the model."
        fix = "Free the GPU's memory, use a larger one, or shorten rows: -o data.max_length=…, --max-new-tokens N."
        if tasks_batch is not None:
            what = (
                f"The tasks' questions, {tasks_batch:,} at a time, do not fit into the GPU's memory beside the model."
            )
            fix = (
                f"--batch-size {tasks_batch // 2}."
                if tasks_batch > 1
                else "Free the GPU's memory, or use a larger one."
            )
        raise UserInputError(what, why=f"{_device(loaded)}: {str(error).splitlines()[0]}", fix=fix) from error


def _vocabulary(loaded: LoadedModel, side: Side) -> int:
    """Rows of the embedding that a side has weights for."""
    if side == "base":
        return loaded.stored_rows
    return len(loaded.model.get_base_model().get_input_embeddings().weight)


def _cut(answers: Sequence[Answer]) -> int:
    return sum(not answer.ended for answer in answers)


def _limit(loaded: LoadedModel, rows: Rows, request: Request) -> int:
    """Maximum tokens of an answer, its end token included.

    Raises:
        UserInputError: a prompt leaves no room for it in the model.
    """
    if not rows.ends:
        raise UserInputError(
            "The tokenizer has no end-of-sequence token, so no answer would ever end.",
            fix="Set eos_token in its tokenizer_config.json, or use --metrics perplexity.",
        )
    longest = max(len(question.expected) for question in rows.questions) + 1
    limit = request.max_new_tokens or max(_SHORTEST_LIMIT, min(_LONGEST_LIMIT, math.ceil(1.5 * longest)))
    positions = model_positions(loaded.model.get_base_model().config)
    prompt = max(len(question.prompt) for question in rows.questions)
    if positions is not None and prompt + limit > positions:
        room = positions - prompt
        if request.max_new_tokens is None and room >= longest:
            return room
        raise UserInputError(
            f"An answer of {limit:,} tokens behind the longest prompt ({prompt:,} tokens) is more than the model's "
            f"{positions:,} positions.",
            fix=f"--max-new-tokens {room}." if room > 0 else "Leave such rows out: -o data.long_rows=drop.",
        )
    return limit


def _batch_size(loaded: LoadedModel, request: Request) -> int:
    return request.batch_size or _BATCH_SIZE[loaded.device.type]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """With its special tokens: one inside an answer makes it another one."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)).strip()


def _answer_text(tokenizer: PreTrainedTokenizerBase, rows: Rows, ids: Sequence[int]) -> str:
    """Without what the template, not the answer, ends with."""
    return _text(tokenizer, ids).removesuffix(rows.tail.strip()).rstrip()


def _say_rows(console: Console, rows: Rows, chosen: ChosenMetrics) -> None:
    own = "the run's own validation rows: " if rows.is_own and not rows.changed else ""
    of = len(rows.prepared)
    drawn = "" if len(rows.chosen) == of else f"; a seeded sample of {len(rows.chosen):,} of {of:,} rows is evaluated"
    terminal.say(console, "data", f"{own}{rows.name}" + (f", split {rows.split}" if rows.split else ""))
    terminal.say(console, "format", f"{rows.prepared_set.choice.name} ({rows.prepared_set.choice.why})")
    terminal.say(console, "rows", counts_line(rows.prepared, rows.section.max_length) + drawn)
    for text in rows.warnings:
        terminal.say(console, "warning", text, "bold red")
    for why, number in rows.without_question.items() if chosen.need_answers else ():
        terminal.say(console, "notice", f"{terminal.count(number, 'row')} not answered: {why}.", "yellow")
    for name, why in chosen.left_out.items():
        terminal.say(console, "left out", f"{name}: {why}.")


def _say_model(console: Console, loaded: LoadedModel) -> None:
    terminal.say(console, "adapter", str(loaded.tuned.adapter))
    terminal.say(console, "base", f"{loaded.tuned.base.model_name_or_path}, on {_device(loaded)}")


def _device(loaded: LoadedModel) -> str:
    return torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "the CPU"


def _notes(rows: Rows | None, limit: int | None, said: Mapping[Side, _AnswerTexts]) -> list[str]:
    if rows is None:
        return []
    found = []
    if len(rows.chosen) < len(rows.prepared):
        found.append(f"A seeded sample: {len(rows.chosen):,} of {len(rows.prepared):,} rows.")
    if len(rows.chosen) < _FEW:
        found.append(f"{terminal.count(len(rows.chosen), 'row')}: with so few, intervals are rough.")
    if rows.prepared.counts.split or rows.prepared.manifest.get("concatenate"):
        found.append(
            "Rows are parts of longer texts; parts of one text are alike, so the intervals are somewhat too narrow."
        )
    found += rows.warnings
    for why, number in rows.without_question.items() if said else ():
        found.append(f"{terminal.count(number, 'row')} not answered: {why}.")
    for side, answers in said.items():
        if answers.cut:
            found.append(
                f"{answers.cut:,} of {len(answers.texts):,} answers of the {side} model were cut off at {limit} tokens."
            )
    return found


def _metadata(
    loaded: LoadedModel,
    weights: _Weights,
    request: Request,
    rows: Rows | None,
    limit: int | None,
    said: Mapping[Side, _AnswerTexts],
    seconds: float,
) -> dict[str, Any]:
    tuned = loaded.tuned
    return {
        "run": tuned.run.name if tuned.run is not None else None,
        "adapter": str(tuned.adapter),
        "checkpoint": tuned.adapter.name,
        "step": weights.step,
        "adapter_sha256": weights.sha256,
        "base_model": tuned.base.model_name_or_path,
        "sides": list(request.sides),
        "device": _device(loaded),
        "dtype": str(loaded.model.get_base_model().dtype).removeprefix("torch."),
        "seconds": round(seconds, 3),
        "data": _data_metadata(rows) if rows is not None else None,
        "generation": {
            "max_new_tokens": limit,
            "rows": len(rows.questions),
            "batch_size": _batch_size(loaded, request),
            "cut_off": {side: answers.cut for side, answers in said.items()},
        }
        if rows is not None and said
        else None,
        "limit": request.tasks.limit if request.tasks is not None else None,
        "chat_template": request.tasks.chat if request.tasks is not None else None,
        "intervals": {"level": 0.95, "resamples": RESAMPLES, "seed": SEED},
    }


def _data_metadata(rows: Rows) -> dict[str, Any]:
    counts = rows.prepared.counts
    return {
        "path": rows.name,
        "split": rows.split,
        "own_validation": rows.is_own,
        "changed_since_training": bool(rows.changed),
        "training_rows": rows.training_rows,
        "training_split": rows.is_training_split,
        "format": rows.prepared_set.choice.name,
        "format_why": rows.prepared_set.choice.why,
        "max_length": rows.section.max_length,
        "long_rows": rows.section.long_rows,
        "fingerprint": rows.prepared_set.about.get("fingerprint"),
        "rows": len(rows.chosen),
        "of_rows": len(rows.prepared),
        "read": counts.read,
        "cut": counts.cut,
        "dropped_long": counts.dropped_long,
        "skipped_errors": counts.skipped_errors,
        "supervised_tokens": int(rows.prepared.supervised[list(rows.chosen)].sum()),
        "questions": len(rows.questions),
        "not_answered": rows.without_question,
    }


def _row_by_row(
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    losses: Mapping[Side, NDArray[np.float64]],
    expected: Sequence[str],
    said: Mapping[Side, _AnswerTexts],
) -> list[dict[str, Any]]:
    questions = {question.number: place for place, question in enumerate(rows.questions)}
    supervised = rows.prepared.supervised
    found = []
    for place, number in enumerate(rows.chosen):
        tokens = int(supervised[number])
        row: dict[str, Any] = {"row": number, "supervised_tokens": tokens}
        if losses:
            row["loss"] = {side: round(float(of_side[place]) / tokens, 6) for side, of_side in losses.items()}
        at = questions.get(number)
        if at is None:
            row["text"] = _text(tokenizer, rows.prepared.row(number)[0].tolist())
        else:
            row["prompt"] = _text(tokenizer, rows.questions[at].prompt)
            row["expected"] = expected[at]
            for side, answers in said.items():
                row[side] = answers.texts[at]
            if said:
                row["exact_match"] = {side: is_exact(expected[at], answers.texts[at]) for side, answers in said.items()}
            if said and parsed(expected[at]) is not None:
                row["json"] = {side: _json_row(expected[at], answers.texts[at]) for side, answers in said.items()}
        found.append(row)
    return found


def _json_row(expected: str, answer: str) -> dict[str, Any]:
    counts = field_counts(expected, answer)
    return {
        "valid": parsed(answer) is not None,
        "right": counts.right,
        "answered": counts.answered,
        "expected": counts.expected,
    }
