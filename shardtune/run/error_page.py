"""The tables of exit codes and error codes in the docs: `python -m shardtune.run.error_page docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardtune.run.error_codes import ERROR_CODES
from shardtune.run.exit_codes import EXIT_CODES


def exit_code_table() -> str:
    rows = [f"| {code} | {entry.meaning} | {entry.restart} |" for code, entry in EXIT_CODES.items()]
    return "\n".join(["| code | meaning | restart it? |", "|---|---|---|", *rows])


def error_code_table() -> str:
    rows = [
        f"| `{entry.code}` | {entry.meaning} | {_exit(entry.exit_code)} | [{entry.page}]({entry.page}) |"
        for entry in ERROR_CODES
    ]
    return "\n".join(["| code | meaning | exit code | more |", "|---|---|---|---|", *rows])


def _exit(code: int | None) -> str:
    return "128 + signal" if code is None else str(code)


TABLES = {
    "exit-codes.md": ("exit codes", exit_code_table),
    "failures.md": ("error codes", error_code_table),
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
