"""How is the next token chosen? Greedy, or drawn with a temperature, from as much of the probability as top-p says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings of generation_config.json that change which tokens are chosen, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,), "temperature": (1.0,), "top_k": (0, 50), "top_p": (1.0,), "min_p": (0.0,),
    "typical_p": (1.0,), "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "num_beams": (1,),
    "guidance_scale": (1.0,), "penalty_alpha": (), "suppress_tokens": (), "bad_words_ids": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy: the likeliest token each time.

    Attributes:
        top_p: Drawn from the likeliest tokens that together have this probability.
        seed: Of every answer anew, so that an answer does not depend on those before it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    @classmethod
    def checked(cls, temperature: float, top_p: float | None, seed: int | None) -> Sampling:
        """Raises UserInputError for values that are out of range or have no effect."""
        if temperature != 0 and not 0.001 <= temperature <= 10:  # below, float32 overflows
            raise UserInputError(
                f"The temperature is {temperature:g}.", fix="Give 0 (greedy), or 0.001 to 10; 0.7 is usual."
            )
        if top_p is not None and not 0 < top_p <= 1:
            raise UserInputError(f"top-p is {top_p:g}.", fix="Give a share above 0 and up to 1; 0.9 is usual.")
        if seed is not None and not 0 <= seed < 2**63:
            raise UserInputError(f"The seed is {seed}.", fix="Give a number from 0 to 2^63 - 1.")
        if temperature == 0 and (top_p is not None or seed is not None):
            name = "top-p" if top_p is not None else "The seed"
            raise UserInputError(
                f"{name} has no effect: nothing is drawn at temperature 0.",
                fix="Set a temperature as well (0.7 is usual), or leave it out.",
            )
        return cls(temperature, 1.0 if top_p is None else top_p, seed)

    def seeded(self) -> Sampling:
        """With a seed, where one is needed: it is shown, so that the answer can be had again."""
        return replace(self, seed=secrets.randbelow(2**31)) if self.temperature and self.seed is None else self

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy (temperature 0)"
        top = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{top}" + (f", seed {self.seed}" if self.seed is not None else "")


def answer_ends(
    tokenizer: PreTrainedTokenizerBase, defaults: Iterable[int], by_format: Iterable[int | None]
) -> frozenset[int]:
    """All that says that an answer is over, wherever one is generated.

    No other token does because of its name: in gpt-oss, <|end|> stands between the reasoning and the answer.

    Args:
        defaults: Ids by the model's generation_config.json (`generation_defaults`).
        by_format: What training took for an end.
    """
    return frozenset(token for token in (tokenizer.eos_token_id, *defaults, *by_format) if token is not None)


def generation_defaults(folder: Path) -> tuple[list[int], dict[str, Any]]:
    """(ids that end an answer, settings that would change what is chosen) by the model's generation_config.json.

    Where there is none, the ids are those of config.json, as transformers has it.

    Only the ids are used: what is chosen is up to the command line, and whoever compares a base with its tuned form
    wants both to be asked in the same way.
    """
    found = _settings(folder / "generation_config.json")
    settings = found or _settings(folder / "config.json")
    eos = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
    ids = [number for number in (eos if isinstance(eos, list) else [eos]) if isinstance(number, int)]
    others = {name: found[name] for name, neutral in _NEUTRAL.items() if found.get(name) not in (None, *neutral)}
    return ids, others


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
