"""The examples' own dependencies (the extra `vision`) are not always there: `make test` adds them for this folder alone."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("torchvision") is None else []
