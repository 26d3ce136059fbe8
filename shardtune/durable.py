"""Is it on the disk? What has to be true before a file or folder is renamed into the place others trust."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Returns when the disk has the file's content, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
