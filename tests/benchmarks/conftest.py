"""The benchmarks are programs beside the package: they are imported from their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

GPU_BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks" / "gpu"
sys.path.insert(0, str(GPU_BENCHMARKS))
