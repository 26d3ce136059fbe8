"""The page: one file, nothing fetched, nothing run, whatever the data says."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_prepared import FakePrepared, fake_set

from shardtune.data.checks import Finding
from shardtune.data.inspect import Report, count_split
from shardtune.data.inspect_page import page, write_page
from shardtune.data.show_rows import Piece, ShownRow, show_rows
from shardtune.errors import UserInputError

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onmouseover='x' </div></main>&amp;"


class Elements(HTMLParser):
    """Collects elements, their attributes and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def report(tokenizer: Any, text: str = "the answer is forty two", **changes: Any) -> Report:
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    prepared = FakePrepared([(ids, len(ids) - 2)] * 4)
    both = fake_set(prepared, prepared, overlap=1)
    values: dict[str, Any] = {
        "source": "rows.jsonl", "format_name": "chat", "format_why": "why", "folder": both.folder, "from_cache": True,
        "overlap": 1, "splits": tuple(count_split(prepared, name, tokenizer, 512) for name in ("train", "val")),
        "findings": (), "shown_of": "train", "rows": tuple(show_rows(prepared, 2, tokenizer)),
    }  # fmt: skip
    return Report(**{**values, **changes})


def test_the_page_is_well_formed_and_tells_what_the_terminal_tells(bytes_bpe: Any) -> None:
    elements = Elements(page(report(bytes_bpe)))
    assert elements.open == []
    for words in ("rows.jsonl", "Training", "Validation", "max_length", "Longest rows", "Rows of train", "p95"):
        assert words in elements.text
    assert "1 of 4 validation rows are also in train" in elements.text
    assert "every row has a supervised end-of-sequence token" in elements.text


def test_nothing_is_fetched_and_nothing_runs(bytes_bpe: Any) -> None:
    text = page(report(bytes_bpe))
    elements = Elements(text)
    assert not {"script", "link", "img", "iframe", "object", "form", "a", "base"} & set(elements.tags)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("src", "href")]
    assert "@import" not in text and "url(" not in text and "://" not in text
    assert "default-src 'none'" in text


def test_markup_in_the_data_is_text_wherever_it_stands(bytes_bpe: Any) -> None:
    finding = Finding("warning", EVIL, EVIL, EVIL)
    plain, evil = report(bytes_bpe), report(bytes_bpe, EVIL)
    evil = report(
        bytes_bpe, EVIL, source=EVIL, format_name=EVIL, format_why=EVIL, folder=Path("/" + EVIL), findings=(finding,)
    )
    text = page(evil)
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text
    elements = Elements(text)
    assert elements.open == []  # no element was closed by the data
    assert set(elements.tags) == set(Elements(page(plain)).tags)
    assert "onmouseover" not in {name for name, _ in elements.attributes}
    assert EVIL in elements.text


def test_a_special_token_named_like_markup_is_text(bytes_bpe: Any) -> None:
    row = ShownRow(0, 1, 1, (Piece("<script>", (7,), True, named=True),))
    assert '<span class="t learnt special" title="token 7, supervised">&lt;script&gt;</span>' in page(
        report(bytes_bpe, rows=(row,))
    )


def test_supervised_tokens_are_marked_one_by_one(bytes_bpe: Any) -> None:
    text = page(report(bytes_bpe))
    eos = bytes_bpe.eos_token_id
    assert f'<span class="t learnt special" title="token {eos}, supervised">&lt;/s&gt;</span>' in text
    assert text.count('class="t learnt special"') == 2  # one end token in each of the two rows
    assert len(re.findall(r'class="t learnt" title', text)) == 2  # and one token before it


def test_the_page_follows_the_readers_colours_and_width(bytes_bpe: Any) -> None:
    text = page(report(bytes_bpe))
    assert "prefers-color-scheme: dark" in text and "max-width: 560px" in text
    assert '<meta name="viewport"' in text


def test_findings_stand_with_why_and_fix(bytes_bpe: Any) -> None:
    elements = Elements(page(report(bytes_bpe, findings=(Finding("error", "Bad.", "Because.", "Mend it."),))))
    assert "error: Bad." in elements.text and "why Because." in elements.text and "fix Mend it." in elements.text
    assert "No problems found." not in elements.text
    assert "No problems found." in Elements(page(report(bytes_bpe))).text


def test_text_that_utf8_cannot_hold_is_written_all_the_same(bytes_bpe: Any, tmp_path: Path) -> None:
    row = ShownRow(0, 2, 0, (Piece("\ud800\x00\x1b", (7,), False),))
    write_page(report(bytes_bpe, rows=(row,)), tmp_path / "page.html")
    assert "\\ud800\\x00\\x1b" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_middle_left_out_is_told(bytes_bpe: Any) -> None:
    row = ShownRow(
        0, 90, 40, (Piece("a", (5,), False),), (Piece("z", (6,), True),), left_out=88, left_out_supervised=39
    )
    assert "… 88 tokens not shown, 39 of them supervised …" in page(report(bytes_bpe, rows=(row,)))


@pytest.mark.parametrize("where", ["missing/page.html", "."])
def test_a_page_that_cannot_be_written_is_an_answer(bytes_bpe: Any, tmp_path: Path, where: str) -> None:
    with pytest.raises(UserInputError, match="could not be written") as raised:
        write_page(report(bytes_bpe), tmp_path / where)
    assert raised.value.why and os.fspath(tmp_path) in raised.value.what
