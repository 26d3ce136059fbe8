"""What do tasks of lm-evaluation-harness say? The harness scores our loaded model; intervals and differences are ours.

The harness is optional (`pip install 'shardtune[eval]'`) and is imported when tasks are asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.errors import UserInputError
from shardtune.evaluation.intervals import Estimate, Z, mean_difference, paired_shares, wilson
from shardtune.evaluation.metrics import Metric, Side

if TYPE_CHECKING:
    from shardtune.inference.load import LoadedModel

_STDERR = "_stderr"
_NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
_SAME_MEAN = 1e-6  # a score that is the mean over documents, to rounding


@dataclass(frozen=True)
class TaskChoice:
    """Attributes:
    names: Of tasks or groups.
    limit: Documents of each task, from its first.
    include_path: A folder with tasks of one's own.
    fewshot: Examples before each question; None: as the task says.
    chat: Ask by the chat template.
    """

    names: tuple[str, ...]
    limit: int | None = None
    include_path: Path | None = None
    fewshot: int | None = None
    chat: bool = False

    @classmethod
    def parse(
        cls, names: str | None, limit: int | None, include_path: Path | None, fewshot: int | None, chat: bool
    ) -> TaskChoice | None:
        """What the command line asks for; None: no tasks.

        Raises:
            UserInputError: no name, or an option without tasks.
        """
        if names is None:
            options = {"--limit": limit, "--include-path": include_path, "--num-fewshot": fewshot}
            given = [option for option, value in options.items() if value is not None]
            if given or chat:
                option = given[0] if given else "--apply-chat-template"
                raise UserInputError(f"{option} has no effect without --tasks.", fix="Leave it out, or give --tasks.")
            return None
        found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        if not found:
            raise UserInputError("--tasks names no task.", fix="Give names with commas between them.")
        return cls(found, limit, include_path, fewshot, chat)


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task; `filter` is the harness's way to read an answer."""

    task: str
    filter: str
    fewshot: int | None
    documents: int | None
    metric: Metric

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "filter": self.filter,
            "fewshot": self.fewshot,
            "documents": self.documents,
            **self.metric.as_dict(),
        }


def check_tasks(choice: TaskChoice) -> None:
    """Raise before a model is loaded if the harness is missing or does not know a task.

    Raises:
        UserInputError: with what to install, or names that are near.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserInputError(
            "--tasks needs lm-evaluation-harness, which is not installed.",
            fix="In the folder of shardtune's sources: pip install -c constraints.txt -e '.[eval]'. "
            "Elsewhere: pip install 'lm-eval>=0.4.13'.",
        )
    if choice.include_path is not None and not choice.include_path.is_dir():
        raise UserInputError(
            f"--include-path: there is no folder '{choice.include_path}'.",
            fix="Give the folder that has the YAML files of your own tasks.",
        )
    known = _manager(choice).all_tasks
    unknown = [name for name in choice.names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=4, cutoff=0.5)
        raise UserInputError(
            f"--tasks: lm-evaluation-harness knows no task '{unknown[0]}'.",
            why=f"It knows {len(known):,} tasks and groups" + (f"; near it: {', '.join(near)}." if near else "."),
            fix="List them with `lm_eval ls tasks`; a folder of your own tasks is given with --include-path.",
        )


def run_tasks(loaded: LoadedModel, choice: TaskChoice, sides: Sequence[Side], *, batch_size: int) -> list[TaskScore]:
    """Every metric of every task, for each side with the same loaded weights.

    Raises:
        UserInputError: a task's data cannot be had, or the harness refuses it.
    """
    from shardtune.evaluation.harness_model import harness_model

    model = harness_model(loaded, batch_size)
    results: dict[Side, dict[str, Any]] = {}
    for side in sides:
        with loaded.side(tuned=side == "tuned"):
            results[side] = _evaluated(model, choice)
    return scores(results)


def scores(results: Mapping[Side, Mapping[str, Any]]) -> list[TaskScore]:
    """What the harness returned for each side, as metrics with intervals.

    A metric that is a mean over documents has a paired difference with an interval, one of a whole corpus only the
    difference. Where every document is right or wrong, intervals are those of shares; otherwise ± 1.96 standard errors.
    """
    asked: dict[tuple[str, str], None] = {}
    for result in results.values():  # a metric may be a number of one side alone
        asked |= {(task, key): None for task, entries in result["results"].items() for key in entries}
    found = []
    for task, key in asked:
        name, comma, filter_ = key.partition(",")
        if comma and name not in _NOT_METRICS and not name.endswith(_STDERR):
            found.append(_score(task, name, filter_, results))
    return found


def _score(task: str, name: str, filter_: str, results: Mapping[Side, Mapping[str, Any]]) -> TaskScore:
    first = next(iter(results.values()))
    each = {side: _per_document(of_side, task, name, filter_) for side, of_side in results.items()}
    sides = {side: _estimate(of_side, task, name, filter_, each[side]) for side, of_side in results.items()}
    difference = None
    if len(results) == 2:
        tuned, base = sides["tuned"].value, sides["base"].value
        difference = Estimate(tuned - base if tuned is not None and base is not None else None)
        documents, of_base = each["tuned"], each["base"]
        if documents is not None and of_base is not None and len(documents) == len(of_base):
            if _is_binary(documents) and _is_binary(of_base):
                difference = paired_shares([bool(one) for one in documents], [bool(one) for one in of_base])
            else:
                difference = mean_difference(documents, of_base)
    higher = (first.get("higher_is_better", {}).get(task) or {}).get(name)
    documents = next(iter(each.values()))
    is_share = documents is not None and all(one is not None and _is_binary(one) for one in each.values())
    count = len(documents) if documents is not None else _effective(first, task)
    return TaskScore(
        task=task,
        filter=filter_,
        fewshot=first.get("n-shot", {}).get(task),
        documents=count,
        metric=Metric(
            name=name,
            title=name,
            kind="share" if is_share else "number",
            better="lower" if higher is False else "higher",
            rows=count or 0,
            sides=sides,
            difference=difference,
        ),
    )


def _estimate(result: Mapping[str, Any], task: str, name: str, filter_: str, documents: np.ndarray | None) -> Estimate:
    if documents is not None and _is_binary(documents):
        return wilson(int(documents.sum()), len(documents))
    entries = result["results"].get(task, {})
    value, error = entries.get(f"{name},{filter_}"), entries.get(f"{name}{_STDERR},{filter_}")
    if not _is_number(value):
        return Estimate(None)
    value = float(value)
    if not _is_number(error) or not float(error):
        return Estimate(value)
    return Estimate(value, value - Z * float(error), value + Z * float(error))


def _per_document(result: Mapping[str, Any], task: str, name: str, filter_: str) -> np.ndarray | None:
    """The metric of each document by its number, where the score is their mean; else None."""
    samples = [one for one in result.get("samples", {}).get(task, ()) if one.get("filter") == filter_]
    values = [one.get(name) for one in sorted(samples, key=lambda one: int(one["doc_id"]))]
    if not values or not all(_is_number(value) for value in values):
        return None
    found = np.array(values, float)
    value = result["results"][task].get(f"{name},{filter_}")
    if not _is_number(value):
        return None
    return found if abs(float(found.mean()) - float(value)) <= _SAME_MEAN * max(1.0, abs(float(value))) else None


def _effective(result: Mapping[str, Any], task: str) -> int | None:
    count = (result.get("n-samples", {}).get(task) or {}).get("effective")
    return int(count) if count is not None and _is_number(count) else None


def _is_binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_) and math.isfinite(float(value))


@lru_cache(maxsize=1)
def _manager(choice: TaskChoice) -> Any:
    """Reading the thousands of its task files takes the harness seconds."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=str(choice.include_path) if choice.include_path is not None else None)


def _evaluated(model: Any, choice: TaskChoice) -> dict[str, Any]:
    import torch
    from lm_eval.evaluator import simple_evaluate

    try:
        found = simple_evaluate(
            model=model,
            tasks=list(choice.names),
            num_fewshot=choice.fewshot,
            limit=choice.limit,
            apply_chat_template=choice.chat,
            task_manager=_manager(choice),
            log_samples=True,
        )
    except torch.cuda.OutOfMemoryError:
        raise
    except ImportError as error:
        raise UserInputError(
            f"lm-evaluation-harness could not run {', '.join(choice.names)}: a package is missing.",
            why=str(error).strip().splitlines()[0],
            fix=f"pip install {error.name}" if error.name else "Install what it names.",
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # ConnectionError is an OSError
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserInputError(
            f"lm-evaluation-harness could not run {', '.join(choice.names)}.",
            why=f"{type(error).__name__}: {first}",
            fix="Where the Hub cannot be reached, put the task's data into the cache first, or give tasks with local "
            "files (--include-path).",
        ) from error
    assert found is not None  # this process is the only one
    return dict(found)
