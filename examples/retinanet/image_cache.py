"""Where are the resized images? On disk, made once, by all ranks together."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

_LONGEST = 1333 / 800  # the longer side over the shorter one, at most: as torchvision and the paper resize
_QUALITY = 95


class CacheError(OSError):
    """The folder of the cache cannot be written."""


Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True)
class ImageCache:
    """Attributes:
    image_size: The shorter side in pixels.
    """

    folder: Path
    image_size: int

    def path(self, image: Path) -> Path:
        """Of an image as it is now: another file under the same name has another one."""
        stat = image.stat()
        key = f"{image.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / str(self.image_size) / name[:2] / f"{name}.jpg"

    def add(self, image: Path, size: Size | None = None) -> str | None:
        """Resize an image, unless that was done before. What is wrong with it, if it cannot be used.

        Args:
            size: That its annotations give it; shares of another one would be other boxes.
        """
        target = self.path(image)
        try:
            with Image.open(image) as opened:
                if size is not None and opened.size != size:
                    return f"has {_pixels(opened.size)}; by its annotations it has {_pixels(size)}"
                if target.is_file():
                    return None
                resized = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return f"cannot be read: {error}"
        resized = resized.resize(self._size(resized.size), Image.Resampling.BILINEAR)
        unfinished = target.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            resized.save(unfinished, "JPEG", quality=_QUALITY, subsampling=0)
            unfinished.replace(target)  # whole or not at all: other ranks and runs look for it
        except OSError as error:
            raise CacheError(f"'{target.parent}' cannot be written: {error.strerror} (--cache-dir).") from error
        return None

    def add_share(
        self, images: Sequence[tuple[Path, Size | None]], share: int, of: int, threads: int
    ) -> dict[int, str]:
        """Every `of`-th image, from number `share` on; what is wrong with those that cannot be used, by number."""
        mine = range(share, len(images), of)
        with ThreadPoolExecutor(threads) as pool:
            reasons = pool.map(lambda number: self.add(*images[number]), mine)
            return {number: reason for number, reason in zip(mine, reasons, strict=True) if reason is not None}

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        short, long = sorted(size)
        scale = min(self.image_size / short, self.image_size * _LONGEST / long)
        width, height = (max(1, round(side * scale)) for side in size)
        return width, height


def _pixels(size: tuple[float, float]) -> str:
    return f"{size[0]:g} × {size[1]:g} pixels"
