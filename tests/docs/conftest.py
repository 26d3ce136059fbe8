"""A cluster for the commands of the pages: the stand-in of an API server that tests/cluster has."""

from __future__ import annotations

import sys

from running import REPOSITORY

sys.path.append(str(REPOSITORY / "tests" / "cluster"))
