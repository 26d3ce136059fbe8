from __future__ import annotations

from chromium import browser, visit  # noqa: F401 - fixtures
