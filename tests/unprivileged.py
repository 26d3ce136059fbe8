"""How a test runs a command as somebody whom file permissions bind: root, too, once it has no capabilities."""

from __future__ import annotations

import os
import shutil

import pytest

_SETPRIV = shutil.which("setpriv")
# The interpreter may stand in root's own home, so that another user could not start it.
PREFIX = [] if os.geteuid() != 0 else [str(_SETPRIV), "--inh-caps=-all", "--bounding-set=-all"]
needs_permissions = pytest.mark.skipif(
    os.geteuid() == 0 and _SETPRIV is None, reason="root without setpriv: file permissions bind nobody here"
)
