"""Ctrl-C at a chosen line, for tests: the moments at which a signal breaks Python code off are some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def interrupted(at: int, action: Callable[[], object], *modules: ModuleType) -> bool:
    """Run `action` with a KeyboardInterrupt before the `at`-th line that it reaches in `modules`.

    Returns:
        False: it ended before, after fewer lines.
    """
    files, seen = {module.__file__ for module in modules}, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
