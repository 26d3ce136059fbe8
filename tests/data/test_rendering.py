"""The same rows and settings become the same tokens in every version, or the version that says so is another one.

A prepared set is found again, and a run resumes after an upgrade, by a fingerprint that has `RENDERING` in it. A change
that makes other tokens of any row here has to raise it, and then renews the digests.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from shardtune.config.schema import DataSection
from shardtune.data.cache import RENDERING
from shardtune.data.prepare import prepare

PROMPTS = [{"question": f"How fast is pump {row}?", "answer": f"{40 + row} litres\n a minute"} for row in range(6)]
TEXTS = [{"text": f"Pump {row} stops; its valve is shut.\n\n" * (row + 1)} for row in range(6)]
TURNS = [
    ("system", "Be brief."),
    ("user", "Is pump 1 on?"),
    ("assistant", "Yes."),
    ("user", "And 2?"),
    ("assistant", "No."),
]
CHATS = [{"messages": [{"role": role, "content": text} for role, text in TURNS[row % 2 : 3 + row]]} for row in range(3)]
CASES = {
    "chat": (CHATS, {"max_length": 128}),
    "prompts": (PROMPTS, {"prompt_template": "Q: {question}\nA: {answer}", "max_length": 48}),
    "text": (TEXTS, {"text_field": "text", "max_length": 48}),
}
DIGESTS = {
    "chat": "3 rows, fae4a1fa371a755e",
    "prompts": "6 rows, a4571dc9a9812246",
    "text": "6 rows, c518b1cbc23900f6",
}


@pytest.mark.parametrize("name", CASES)
def test_rows_become_the_tokens_and_labels_that_this_rendering_gives_them(name: str, tmp_path: Path) -> None:
    rows, settings = CASES[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    section = DataSection(dataset_name_or_path=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path), **settings)
    train = prepare(section, 42, chat_tokenizer("chatml"), "chatml", workers=1).train
    digest = hashlib.sha256()
    for number in range(len(train)):
        for part in train.row(number):
            digest.update(np.asarray(part, dtype=np.int64).tobytes() + b"|")
    found = f"{len(train)} rows, {digest.hexdigest()[:16]}"
    assert RENDERING == ("0.1.0", 2), "renew the digests"
    assert found == DIGESTS[name], "the same rows become other tokens: raise RENDERING in shardtune/data/cache.py"
