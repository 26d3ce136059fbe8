"""Is the output in docs/quickstart.md what the code prints? Writes it (`make readme`), and tells which lines are stale.

A block stands between `<!-- output:NAME -->` and `<!-- /output -->`. It is written by running its command; numbers,
paths, names and times are those of that run. A line is stale when its form, all of those masked, is not printed any more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shardtune.terminal import wrapped

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
_BLOCK = re.compile(
    r"<!-- output:quickstart -->\n```console\n\$ make quickstart\n(.*?)```\n<!-- /output -->", re.DOTALL
)
_WIDTH, _INDENT = 100, 10
# The last is only printed where rank 0 is the later one to look for the prepared data.
_LEFT_OUT = ("profile ", "planned ", "training rows: ", "validation rows: ", "weights ", "waiting for another process ")
_STEPS_SHOWN = 3  # before the last one
_BOXES = "“╭├│╰"
_MASKS = (
    (r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S+", "TIME HOST"),
    (r"\d{8}-\d{6}-[0-9a-f]{4}", "ID"),
    (r"'[^']*'|\"[^\"]*\"", "TEXT"),
    (r"(?<![\w/])(?:~/|/|runs/)\S+", "PATH"),
    (r"\d[\d,.:]*(?:e[+-]\d+)?", "N"),
    (r"N (?:B|KiB|MiB|GiB)\b", "N BYTES"),
    (r"epochs\b", "epoch"),
    (r" +", " "),
)


def shown(output: str) -> list[str]:
    """The lines of a quickstart that a newcomer needs: what is trained, a few steps, the scores, one answer, what is next."""
    lines = [line.rstrip() for line in output.splitlines() if not line.startswith(_LEFT_OUT)]
    steps = [line for line in lines if line.startswith("step ")]
    answers = [i for i, line in enumerate(lines) if line.startswith("“")]
    if len(answers) > 1:
        end = max(i for i, line in enumerate(lines) if line.startswith("╰"))
        lines[answers[1] - 1 : end + 1] = []
    for line in steps[_STEPS_SHOWN:-1]:
        lines.remove(line)
    if len(steps) > _STEPS_SHOWN + 1:
        lines.insert(lines.index(steps[-1]), "…")
    return lines


def forms(lines: Iterable[str]) -> list[str]:
    """Lines with all masked that differs between runs; those of answers, which a model has written, are left out."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" " * _INDENT) and found:
            found[-1] += line[_INDENT - 1 :]  # a line that was wrapped
        elif line.strip() and line != "…" and line[0] not in _BOXES:
            found.append(line)
    return [_masked(line) for line in found]


def _masked(line: str) -> str:
    for pattern, mask in _MASKS:
        line = re.sub(pattern, mask, line)
    return line.strip()


def stale(page: str, output: str) -> list[str]:
    """Forms that stand on the page and are not printed, and those that are printed and missing there."""
    block = _BLOCK.search(page)
    assert block is not None, "docs/quickstart.md has lost the markers of its output"
    there, printed = forms(block[1].splitlines()), forms(shown(output))
    return [
        *(f"not printed: {form}" for form in there if form not in printed),
        *(f"missing: {form}" for form in printed if form not in there),
    ]


def rewritten(page: str, output: str, folder: Path) -> str:
    """The page with its block made new from a quickstart that ran in `folder`."""
    for path, short in ((f"{folder.resolve()}/", ""), (str(Path.home()), "~")):
        output = output.replace(path, short)
    lines = "\n".join(wrapped(line, _WIDTH, _INDENT) for line in shown(output))
    block = f"<!-- output:quickstart -->\n```console\n$ make quickstart\n{lines}\n```\n<!-- /output -->"
    return _BLOCK.sub(lambda _: block, page)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardtune", "quickstart"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "COLUMNS": "80"}, stdout=subprocess.PIPE, text=True, check=True
        )
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), done.stdout, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
