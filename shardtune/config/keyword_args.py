"""Are the keyword arguments in `optim_args` and `lr_scheduler_kwargs` valid?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardtune.config.expected import expected
from shardtune.config.fields import Section
from shardtune.config.problems import shown
from shardtune.config.suggestions import nearest

KeywordProblem = tuple[str, str, str]  # key, what is wrong with it, what to change


def check_keywords(arguments: type[Section], given: Mapping[str, Any], taker: str) -> list[KeywordProblem]:
    """Keys that `arguments` does not have, and values that it does not take.

    Args:
        taker: What the arguments are for, as it is called in the messages (`cosine`, `sgd`).
    """
    try:
        arguments.model_validate(dict(given))
    except ValidationError as error:
        return [_problem(arguments, str(one["loc"][0]), one["input"], taker) for one in error.errors()]
    return []


def _problem(arguments: type[Section], key: str, value: Any, taker: str) -> KeywordProblem:
    fields = arguments.model_fields
    if key in fields:
        if fields[key].is_required() and isinstance(value, Mapping):  # left out: pydantic shows the whole mapping
            return key, f"{taker} needs {key}: {fields[key].description}", f"add `{key}`, {expected(fields[key])}"
        return key, f"expected {expected(fields[key])}; got {shown(value)}", ""
    close = nearest(key, fields)
    takes = f"it takes {', '.join(fields)}" if fields else "remove it"
    return key, f"{taker} has no argument '{key}'", f"did you mean `{close}`?" if close else takes
