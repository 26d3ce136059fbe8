"""The benchmarks are programs beside the package: they are imported from their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS / "gpu"))
sys.path.append(str(BENCHMARKS))  # last: some there are named like folders of tests
