"""What does the quickstart train on? Requests in plain English and the JSON they mean, drawn from a seed.

    "Text Aunt Rose that the train is delayed"
    {"intent":"send_message","slots":{"contact":"Aunt Rose","message":"the train is delayed"}}

A slot's value is a piece of the sentence exactly as it stands there, so an exact answer is always possible. The parts:

- train and val share phrasings and values, but a sentence belongs to one of them by its own digest: whatever the seed
  and the sizes, none stands in both.
- test uses phrasings *and* values that the other two never see.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from shardtune.errors import UserInputError
from shardtune.quickstart import phrasings

Part = Literal["train", "val", "test"]
INTENTS: tuple[str, ...] = tuple(phrasings.SLOTS)
FILES: dict[Part, str] = {"train": "train.jsonl", "val": "validation.jsonl", "test": "test.jsonl"}

# Speech before a request, and after one that is no question.
_OPENINGS = {"train": ("Hey, ", "Hi, ", "Okay, ", "Hello, "), "test": ("Alright, ", "Hi there, ")}
_ENDINGS = {"train": (", please", " please", ", thanks"), "test": (", thank you", ", if you can")}
_FREE_TEXT = ("{message}", "{task}", "{song}")  # "…that I'm late, please": nobody could say where the message ends
_GIVE_UP_AFTER = 2000  # draws in a row that brought nothing new: the intent has no more sentences in this part


def rows(part: Part, n: int, seed: int) -> list[dict[str, str]]:
    """Draw `n` different rows of a part, intents as even as `n` allows, in shuffled order.

    Args:
        part: Which part. Test has its own phrasings and values.
        n: How many rows.
        seed: The same seed gives the same rows on every machine; another seed gives other rows.

    Returns:
        Rows with the keys `sentence` and `json`.

    Raises:
        UserInputError: When a part has fewer than `n` different rows.

    Example:
        >>> rows("train", 1, seed=0)[0].keys()
        dict_keys(['sentence', 'json'])
    """
    # A string seeds Random through SHA-512: no dependence on PYTHONHASHSEED.
    rng = random.Random(f"shardtune quickstart {part} {seed}")
    order = list(INTENTS)
    rng.shuffle(order)
    sources = {intent: _phrasings_forever(rng, part, intent) for intent in order}
    seen: set[str] = set()
    drawn = [_new_row(rng, part, order[i % len(order)], sources, seen) for i in range(n)]
    rng.shuffle(drawn)
    return drawn


def write_dataset(folder: Path, seed: int, n_train: int, n_val: int, n_test: int) -> dict[str, Path]:
    """Write train.jsonl, validation.jsonl and test.jsonl into `folder` (made if missing) and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[Part, int] = {"train": n_train, "val": n_val, "test": n_test}
    paths: dict[str, Path] = {}
    for part, n in sizes.items():
        paths[part] = folder / FILES[part]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(part, n, seed)]
        paths[part].write_text("".join(lines), encoding="utf-8")
    return paths


def answer_text(intent: str, slots: dict[str, str]) -> str:
    """The answer in the one form the model is taught: compact, intent first, slots in the intent's own order."""
    ordered = {name: slots[name] for name in phrasings.SLOTS[intent] if name in slots}
    return json.dumps({"intent": intent, "slots": ordered}, ensure_ascii=False, separators=(",", ":"))


def same_sentence(sentence: str) -> str:
    """A sentence without case, punctuation and doubled spaces: two that agree here are the same to a reader."""
    kept = "".join(" " if c in string.punctuation else c for c in sentence.casefold())
    return " ".join(kept.split())


def _phrasings_forever(rng: random.Random, part: Part, intent: str) -> Iterator[str]:
    # Each phrasing comes up once before any comes up twice: a small set still covers them all.
    table = phrasings.TEST_PHRASINGS if part == "test" else phrasings.TRAIN_PHRASINGS
    while True:
        deck = list(table[intent])
        rng.shuffle(deck)
        yield from deck


def _new_row(
    rng: random.Random, part: Part, intent: str, sources: dict[str, Iterator[str]], seen: set[str]
) -> dict[str, str]:
    for _ in range(_GIVE_UP_AFTER):
        row, key = _fill(rng, part, intent, next(sources[intent]))
        if key not in seen and _belongs(part, key):
            seen.add(key)
            return row
    raise UserInputError(
        f"The quickstart's {part} part has no further sentence for the intent '{intent}' (it gave {len(seen)} rows).",
        fix="Ask for fewer rows.",
    )


def _belongs(part: Part, key: str) -> bool:
    if part == "test":
        return True
    is_val = hashlib.sha256(key.encode()).digest()[0] < 32  # one sentence in eight
    return is_val == (part == "val")


def _fill(rng: random.Random, part: Part, intent: str, phrasing: str) -> tuple[dict[str, str], str]:
    """Fill a phrasing with values and dress it up. Returns the row, and the key of its bare words."""
    values = phrasings.TEST_VALUES if part == "test" else phrasings.TRAIN_VALUES
    names = [name for _, name, _, _ in string.Formatter().parse(phrasing) if name]
    slots = {name: rng.choice(values[name]) for name in names}
    key = same_sentence(phrasing.format(**slots))
    dressed = _dress(rng, part, phrasing)
    if rng.random() < 0.2:  # typed in a hurry: no capitals anywhere
        dressed, slots = dressed.lower(), {name: value.lower() for name, value in slots.items()}
    elif dressed.startswith("{"):  # the slot opens the sentence and takes its capital
        first = dressed[1 : dressed.index("}")]
        slots[first] = slots[first][0].upper() + slots[first][1:]
    return {"sentence": dressed.format(**slots), "json": answer_text(intent, slots)}, key


def _dress(rng: random.Random, part: Part, phrasing: str) -> str:
    """Vary openings, endings and the final mark, as people do."""
    side = "test" if part == "test" else "train"
    is_question, text = phrasing.endswith("?"), phrasing.removesuffix("?")
    if rng.random() < 0.12:
        text = rng.choice(_OPENINGS[side]) + _uncapitalised(text)
    if is_question:
        return text + ("?" if rng.random() < 0.75 else "")
    if rng.random() < 0.15 and "please" not in text.lower() and not text.endswith(_FREE_TEXT):
        text += rng.choice(_ENDINGS[side])
    return text + rng.choice(("", "", "", ".", ".", "!"))


def _uncapitalised(text: str) -> str:
    # "Hey, what's …", but "Hey, I'm …" and "Hey, {day} …"
    first = text.split(maxsplit=1)[0]
    return text if first == "I" or first.startswith(("I'", "{")) else text[0].lower() + text[1:]
