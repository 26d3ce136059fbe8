"""An option without effect on a target is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from shardtune.errors import UserInputError
from shardtune.export.request import ExportRequest, TargetName
from shardtune.export.targets import prepare

OPTIONS: dict[str, Any] = {
    "dtype": "bf16", "quantization": "q8_0", "min_surviving_delta": 0.5, "max_shard_bytes": 1_000_000,
}  # fmt: skip
TAKEN = {
    "merged": {"dtype", "min_surviving_delta", "max_shard_bytes"},
    "gguf": {"dtype", "quantization", "min_surviving_delta"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("target", get_args(TargetName))
def test_an_option_is_taken_or_refused(target: TargetName, option: str, tmp_path: Path) -> None:
    nothing: Any = None
    request = ExportRequest(nothing, target, tmp_path / "out", **{option: OPTIONS[option]})
    if option in TAKEN.get(target, ()):
        with pytest.raises(AttributeError):  # on to the model, which is not there
            prepare(request)
    else:
        with pytest.raises(UserInputError, match=f"no effect with --to {target}"):
            prepare(request)
