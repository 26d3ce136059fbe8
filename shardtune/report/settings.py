"""Which settings did a run have? config.yaml as it was written: each value, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardtune.durable import read_plain


@dataclass(frozen=True)
class Setting:
    path: str
    value: str
    origin: str

    @property
    def is_default(self) -> bool:
        return self.origin == "default" or self.origin.startswith("default:")


def read_settings(run: Path) -> list[Setting]:
    """The settings of a run in order; empty without a config.yaml."""
    try:
        lines = read_plain(run / "config.yaml").decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found, section, key = [], "", ""
    for line in lines:
        # The comment never contains two spaces, so the last `  # ` separates it from the value.
        body, mark, origin = line.rpartition("  # ")
        text = body.rstrip() if mark else line.rstrip()
        name, colon, value = text.strip().partition(": ")
        indent = len(text) - len(text.lstrip())
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        if not colon and text.endswith(":"):
            section, key = (name[:-1], "") if indent == 0 else (section, name[:-1])
            continue
        if indent <= 2:
            key = ""
        found.append(Setting(".".join(filter(None, (section, key, name))), value, origin if mark else ""))
    return found


def bare(value: str) -> str:
    """A value of config.yaml without the quotes that YAML needs."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return "" if value in ("null", "~") else value[1:-1] if quoted else value


def bare_settings(run: Path) -> dict[str, str]:
    """The values of a run's settings by their path."""
    return {setting.path: bare(setting.value) for setting in read_settings(run)}


def differences(runs: list[list[Setting]]) -> list[tuple[str, list[str | None]]]:
    """(setting, its value in each run) where they differ; None where a run does not have it."""
    values = [{setting.path: setting.value for setting in settings} for settings in runs]
    paths = dict.fromkeys(path for run in values for path in run)
    rows = [(path, [run.get(path) for run in values]) for path in paths]
    return [(path, row) for path, row in rows if len(set(row)) > 1]
