"""Which types do settings share? Numbers that are not truth values, lists as people type them, the base of sections."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

LARGEST: dict[type, float] = {int: 2**32 - 1, float: 3e38}  # a seed may be as large; float32's largest


def number(value: Any) -> Any:
    # pydantic takes `true` for 1; nobody who writes `r: true` means rank 1.
    if isinstance(value, bool):
        raise ValueError("expected a number, not true/false")
    # Beyond this torch and the clocks overflow, each with an error of its own.
    if type(value) in LARGEST and abs(value) > LARGEST[type(value)]:
        raise ValueError(f"expected a number up to {LARGEST[type(value)]}")
    return value


def comma_list(value: Any) -> Any:
    # `-o lora.target_modules=q_proj,v_proj` is how people write a list on a command line. A regular expression may
    # hold a comma too (`.{1,2}_proj`), so only plain names are taken apart.
    if isinstance(value, str) and "," in value and re.fullmatch(r"[\w\s.,-]+", value):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Int = Annotated[int, BeforeValidator(number)]
Float = Annotated[float, BeforeValidator(number)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, defaults are checked, descriptions come from the fields."""

    # YAML has .inf and .nan, and 1e999 overflows to infinity: no setting accepts them.
    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False)
