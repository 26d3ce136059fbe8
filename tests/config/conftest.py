"""A folder to write configs in, and the report a bad one gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from small_configs import Load, Report

from shardtune.config import ConfigError, ResolvedConfig, load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test, so that reports say `run.yaml:1:1` and not a long path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    def load(text: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> ResolvedConfig:
        (folder / "run.yaml").write_text(text, encoding="utf-8")
        return load_config(Path("run.yaml"), overrides, environ=environ or {})

    return load


@pytest.fixture
def report(load: Load) -> Report:
    """What the user reads when the config is refused, with line breaks of the layout taken out."""

    def report(text: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, overrides, environ)
        return " ".join(str(caught.value).split())

    return report
