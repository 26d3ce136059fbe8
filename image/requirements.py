"""What has to be installed beside what the base image has? For the Containerfile: `requirements.py WHEEL EXTRAS OUT`.

Writes OUT/requirements.txt, what the wheel of shardtune needs, and OUT/constraints.txt, the tested versions. Where the
base image has a torch of its own (NGC's are built for its CUDA and NCCL, and call themselves 2.11.0a0+…), that one is
pinned and required by nobody, so that pip neither replaces it nor refuses its version.
"""

from __future__ import annotations

import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
# Built together with torch: where the base has torch, these are the base's too.
WITH_TORCH = ("torch", "torchvision", "torchaudio", "triton", "pytorch-triton")


def needed(wheel: Path, extras: set[str]) -> list[str]:
    """The wheel's requirements, of these extras too."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode("utf-8")
    found = []
    for line in re.findall(r"^Requires-Dist: (.*)$", text, flags=re.MULTILINE):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if extra is None or extra[1] in extras:
            found.append(requirement.strip())
    return found


def in_base(name: str) -> str | None:
    """The version that the base image has."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def main(wheel: Path, extras: set[str], out: Path) -> None:
    kept = {name: version for name in WITH_TORCH if (version := in_base(name))} if in_base("torch") else {}
    requirements = [line for line in needed(wheel, extras) if name_of(line) not in kept]
    tested = [
        line
        for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
        if not (kept and name_of(line) in WITH_TORCH)
    ]
    constraints = tested + [f"{name}=={version}" for name, version in kept.items()]
    (out / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    (out / "constraints.txt").write_text("\n".join(constraints) + "\n", encoding="utf-8")
    print(f"torch: {kept['torch']}, of the base image" if kept else "torch: installed, as constraints.txt says")


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(filter(None, sys.argv[2].split(","))), Path(sys.argv[3]))
