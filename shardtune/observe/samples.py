"""What did the model answer before training, and after? Some samples of a run, four short lines each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from shardtune.terminal import count

_SHOWN = 3


@dataclass(frozen=True)
class SampleAnswer:
    """A row and the model's answers; None where none was generated."""

    row: str
    prompt: str
    before: str | None
    after: str | None
    expected: str


def show_samples(console: Console, samples: Sequence[SampleAnswer]) -> None:
    """The first few, each text on one line cut to the width: a prompt's end is shown, an answer's beginning."""
    for sample in samples[:_SHOWN]:
        console.print(_line("sample", f"{sample.row}  ", sample.prompt, console.width, keep_end=True))
        for label, text in (("before", sample.before), ("after", sample.after), ("expected", sample.expected)):
            if text is not None:
                same = label != "expected" and text == sample.expected
                console.print(_line(label, "", text or "(nothing)", console.width), style="green" if same else "")
    if len(samples) > _SHOWN:
        console.print(
            f"          and {count(len(samples) - _SHOWN, 'more sample')} in the run's events", highlight=False
        )


def _line(label: str, lead: str, text: str, width: int, *, keep_end: bool = False) -> Text:
    words = " ".join(text.split())
    room = max(10, width - 10 - len(lead))
    if len(words) > room:
        words = "…" + words[1 - room :] if keep_end else words[: room - 1] + "…"
    return Text.assemble((f"{label:<10}", "bold"), lead, words, no_wrap=True, overflow="ellipsis")
