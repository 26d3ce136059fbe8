"""These tests run by themselves, as `make test` starts them: with torchvision, which stays out of the environment, and with
the example's own modules, whose names (`train`) are also those of folders here."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("detector") and importlib.util.find_spec("torchvision") else ["*"]
