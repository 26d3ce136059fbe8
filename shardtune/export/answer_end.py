"""Where does an answer of the exported model end? At the token that ended a turn in training: servers stop there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.inference.load import load_tuned_tokenizer
from shardtune.inference.prompts import prompt_format
from shardtune.inference.sampling import generation_defaults
from shardtune.inference.trained_format import trained_format

if TYPE_CHECKING:
    from shardtune.export.request import ExportLog
    from shardtune.inference.source import TunedModel

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class AnswerEnd:
    """The token that ended a turn in training.

    Attributes:
        settings: The base's generation settings, with it among `eos_token_id`.
    """

    token: str
    number: int
    settings: Mapping[str, Any]

    def write(self, folder: Path, log: ExportLog) -> None:
        text = json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n"
        (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")
        log.say("answers", f"end at {self.token} (id {self.number}), as in training: added to {GENERATION_CONFIG}")


def missing_answer_end(tuned: TunedModel, base: Path) -> AnswerEnd | None:
    """What has to be added to the generation settings of the base so that answers end where they did in training.

    A base model that learnt a chat template would otherwise go on: its own end of a text never comes. None where
    nothing is missing, or where it is not known.
    """
    token, number = end_of_turn(tuned, base)
    known, _ = generation_defaults(base)
    if number is None or number in known:
        return None
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    if (base / GENERATION_CONFIG).is_file():
        settings = dict(json.loads((base / GENERATION_CONFIG).read_text(encoding="utf-8")))
    else:  # transformers takes these from config.json then
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        settings = {name: text[name] for name in names if text.get(name) is not None}
    own = settings.get("eos_token_id", text.get("eos_token_id"))
    ids = own if isinstance(own, list) else [own] if own is not None else []
    return AnswerEnd(token, number, {**settings, "eos_token_id": [*ids, number]}) if number not in ids else None


def end_of_turn(tuned: TunedModel, base: Path) -> tuple[str, int | None]:
    """The token that ended a turn in training, and its id; None: no conversations were trained on, or it is unknown."""
    try:
        trained = trained_format(tuned)
        if not trained.known or trained.choice.name != "chat":
            return "", None
        tokenizer = load_tuned_tokenizer(tuned, base)
        end = prompt_format(trained, tokenizer).end
    except UserInputError:  # no events, or a template that is gone: nothing to go by
        return "", None
    return end, tokenizer.get_vocab().get(end) if end else None
