"""Do the installed packages fit each other, the driver, and the model's class? Nothing is imported to find out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from shardtune.config.script_config import is_script_config
from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.model.families.registry import family_for

_OWNERS = ("torch", "transformers", "peft", "accelerate", "datasets")  # whose own requirements are compared, too
_CUDA_LIBRARY = b"libtorch_cuda.so"  # named in what was linked against it
_SHOWN = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors")


def check_packages(system: System, job: Job) -> Iterator[Finding]:
    wanted = system.requires("shardtune")
    if not wanted:
        yield ok("packages", "not checked: shardtune is not installed as a package, so its requirements are unknown")
        return
    problems = [problem for line in wanted if (problem := _unmet(system, "shardtune", line))]
    for owner in _OWNERS:
        problems += [
            problem
            for line in system.requires(owner)
            if system.version(Requirement(line).name) and (problem := _unmet(system, owner, line))
        ]
    yield from problems
    if not problems:
        shown = ", ".join(f"{name} {version}" for name in _SHOWN if (version := system.version(name)))
        yield ok("packages", shown)


def _unmet(system: System, owner: str, line: str) -> Finding | None:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    name, installed = requirement.name, system.version(requirement.name)
    fix = f"pip install '{name}{requirement.specifier}', or use an image with the versions in constraints.txt."
    if installed is None:
        return fail("packages", f"{name} is not installed; {owner} needs it", fix)
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    text = f"{name} {installed} is installed; {owner} needs {name}{requirement.specifier}"
    floors = [Version(spec.version) for spec in requirement.specifier if spec.operator in (">=", "==", "~=")]
    # An older major lacks what is called; a neighbouring minor usually works, and only its tests are missing.
    too_old = any(Version(installed).major < floor.major for floor in floors)
    return fail("packages", text, fix) if too_old else warn("packages", text, fix)


def check_cuda(system: System, job: Job) -> Iterator[Finding]:
    """Whether the driver can run the CUDA that torch was built for; minor versions are compatible."""
    driver, built = system.gpus.get("cuda_driver"), system.torch_cuda
    if not system.gpus.get("gpus"):
        return
    if built is None:
        # Without a torch there is a finding on packages.
        if system.version("torch"):
            verdict = fail if job.config is not None and job.config.parallel.device == "cuda" else warn
            yield verdict(
                "cuda",
                f"this machine has GPUs, but torch {system.version('torch')} is a CPU build",
                "Install a CUDA build of torch (pip install torch --index-url https://download.pytorch.org/whl/cu130).",
            )
    elif driver is not None and _major(driver) < _major(built):
        yield fail(
            "cuda",
            f"torch is built for CUDA {built}; driver {system.gpus.get('driver', '?')} supports up to CUDA {driver}",
            f"Update the driver on the host, or use an image whose torch is built for CUDA {_major(driver)}.",
        )
    else:
        yield ok("cuda", f"torch for CUDA {built}, driver {system.gpus.get('driver', '?')} up to CUDA {driver or '?'}")


def check_torchvision(system: System, job: Job) -> Iterator[Finding]:
    """transformers imports it wherever it is installed, and then fails if its library does not load."""
    folder, torch = system.folder("torchvision"), system.version("torch")
    library = next(iter(folder.glob("_C*.so")), None) if folder is not None else None
    is_ours = job.config is None or not is_script_config(job.config)  # a script may do without transformers
    if is_ours and library is not None and torch and not system.torch_cuda and _CUDA_LIBRARY in library.read_bytes():
        text = f"torchvision {system.version('torchvision')} is built for CUDA and torch {torch} is not"
        fix = "pip uninstall torchvision: transformers cannot be imported beside it. Or install both from one place."
        yield fail("torchvision", text, fix)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def check_model_class(system: System, job: Job) -> Iterator[Finding]:
    """Whether the installed transformers has the class that the checkpoint names, and is new enough for its family."""
    content = _model_config(job)
    if content is None:
        return
    text = content.get("text_config") if isinstance(content.get("text_config"), dict) else {}
    kinds = [str(kind) for kind in (content.get("model_type"), (text or {}).get("model_type")) if kind]
    installed = system.version("transformers")
    if not kinds or installed is None or "auto_map" in content:
        return
    family = family_for(kinds[-1])
    fix = f"pip install 'transformers>={family.min_transformers if family else installed}', or use a newer image."
    if family is not None and Version(installed) < Version(family.min_transformers):
        evidence = f"{family.name} needs transformers {family.min_transformers} or later; {installed} is installed"
        yield fail("model class", evidence, fix)
        return
    folder = system.folder("transformers")
    tables = [file.read_text(encoding="utf-8") for file in folder.glob("models/auto/*.py")] if folder else []
    unknown = [kind for kind in kinds if tables and not any(f'"{kind}"' in table for table in tables)]
    if unknown:
        yield fail("model class", f"transformers {installed} has no model_type {', '.join(unknown)}", fix)
    elif tables:
        name = ", ".join(content.get("architectures") or kinds)
        yield ok("model class", f"transformers {installed} has {name} (model_type {', '.join(kinds)})")


def _model_config(job: Job) -> dict[str, Any] | None:
    try:
        content = json.loads((job.model / "config.json").read_text(encoding="utf-8")) if job.model else None
    except (OSError, ValueError):  # what is wrong with the folder is said by `check_model_folder`
        return None
    return content if isinstance(content, dict) else None
