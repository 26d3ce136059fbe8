"""Where does an answer of the exported model end? At the token that ended a turn in training: servers stop there."""

from __future__ import annotations

import json
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

_FILE = "generation_config.json"


def add_end_of_turn(tuned: TunedModel, base: Path, folder: Path, log: ExportLog) -> None:
    """Let generation_config.json in `folder` end answers where the chat template of training ends a turn.

    A base model that learnt a chat template would otherwise go on: its own end of a text never comes.
    """
    token, number = end_of_turn(tuned, base)
    known, _ = generation_defaults(folder)
    if number is None or number in known:
        return
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    if (folder / _FILE).is_file():
        settings = dict(json.loads((folder / _FILE).read_text(encoding="utf-8")))
    else:  # transformers takes these from config.json then
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        settings = {name: text[name] for name in names if text.get(name) is not None}
    own = settings.get("eos_token_id", text.get("eos_token_id"))
    ids = own if isinstance(own, list) else [own] if own is not None else []
    if number in ids:
        return
    settings["eos_token_id"] = [*ids, number]
    (folder / _FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    log.say("answers", f"end at {token} (id {number}), as in training: added to {_FILE}")


def end_of_turn(tuned: TunedModel, base: Path) -> tuple[str, int | None]:
    """The token that ended a turn in training, and its id; None: no conversations were trained on, or it is unknown."""
    if tuned.run is None:
        return "", None
    try:
        trained = trained_format(tuned)
        if trained.choice.name != "chat":
            return "", None
        tokenizer = load_tuned_tokenizer(tuned, base)
        end = prompt_format(trained, tokenizer).end
    except UserInputError:  # no events, or a template that is gone: nothing to go by
        return "", None
    return end, tokenizer.get_vocab().get(end) if end else None
