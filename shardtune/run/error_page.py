"""What do the docs say about exit codes and error codes? `python -m shardtune.run.error_page docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardtune.run.error_codes import ERROR_CODES, ErrorCode
from shardtune.run.exit_codes import EXIT_CODES


def exit_code_table() -> str:
    rows = [f"| {code} | {entry.meaning} | {entry.restart} |" for code, entry in EXIT_CODES.items()]
    return "\n".join(["| code | meaning | restart it? |", "|---|---|---|", *rows])


def error_code_sections() -> str:
    """Symptom, causes and fixes of every code."""
    return "\n\n".join(_section(entry) for entry in ERROR_CODES)


def _section(entry: ErrorCode) -> str:
    code = "128 + signal" if entry.exit_code is None else str(entry.exit_code)
    lines = [f"### {entry.code}", "", entry.meaning, ""]
    for title, texts in (("Causes", entry.causes), ("Fixes", entry.fixes)):
        lines += [f"{title}:", "", *(f"- {text}" for text in texts), ""]
    return "\n".join([*lines, f"Exit code {code}. More: [{entry.page}]({entry.page})."])


TABLES = {
    "exit-codes.md": ("exit codes", exit_code_table),
    "troubleshooting.md": ("error codes", error_code_sections),
}


def with_table(page: str, text: str) -> str:
    """The page's text with its table as it is now."""
    name, table = TABLES[page]
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    for page in TABLES:
        path = Path(sys.argv[1]) / page
        path.write_text(with_table(page, path.read_text(encoding="utf-8")), encoding="utf-8")
