"""How fast are this GPU and this link? `catalogue.yaml` beside this file, changed by a file of the user's.

Rates are what code reaches; each entry says whether that was measured or comes from a data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardtune.config.problems import ConfigError, Place, Problem
from shardtune.config.settings_file import UnsuitableFileError, read_settings_file
from shardtune.config.suggestions import nearest
from shardtune.config.yaml_reader import Node, merge, read_yaml
from shardtune.errors import UserInputError
from shardtune.plan.facts import Machine

USER_FILE = Path("~/.config/shardtune/catalogue.yaml")
_SHIPPED = "catalogue.yaml"
_DEFAULT_NETWORK = "NDR"
_STAND_IN = "H100"
_FORM = "The number comes first: 2xH200. "

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_RateOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    names: list[str] = []
    measured: bool
    source: str

    def matches(self, name: str) -> bool:
        return _plain(name) in map(_plain, (self.name, *self.names))


class Gpu(_Entry):
    """What one GPU reaches; units are in the names, as in the file."""

    memory_gib: _Rate
    matmul_tflops: _Rate
    fp8_tflops: _RateOrNone
    attention_tflops: _Rate
    varlen_tflops: _Rate
    bandwidth_gbs: _Rate
    host_forward_ms: _RateOrNone
    host_backward_ms: _RateOrNone
    pcie_gbs: _Rate
    link: str

    @property
    def memory(self) -> int:
        """Bytes that a process can allocate."""
        return int(self.memory_gib * 2**30)

    @property
    def device(self) -> str:
        return "cpu" if self.name == "CPU" else "cuda"


class Link(_Entry):
    """What connects GPUs, or nodes."""

    gbs: _Rate
    latency_us: _RateOrNone
    shared: bool

    @property
    def bandwidth(self) -> float:
        """Bytes a second in one direction, of a GPU or (`shared`) of a node."""
        return self.gbs * 1e9

    @property
    def latency(self) -> float:
        """Seconds."""
        return self.latency_us * 1e-6


@dataclass(frozen=True)
class Cluster:
    """What a step computes on.

    Attributes:
        within: Between the GPUs of a node.
        between: Between nodes.
        nodes: Ranks on each node.
    """

    gpu: Gpu
    within: Link
    between: Link
    nodes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True)
class Catalogue:
    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]

    def gpu(self, name: str) -> Gpu:
        """By its short name or the driver's (`H200`, `NVIDIA H200`, `h100-80gb`).

        Raises:
            UserInputError: no GPU of the catalogue is called that.
        """
        return _find(name, self.gpus, "GPU")

    def link(self, name: str) -> Link:
        """By name (`NDR`, `NVLink4`, `100GbE`).

        Raises:
            UserInputError: no link of the catalogue is called that.
        """
        return _find(name, self.links, "link")

    def gpus_of(self, text: str) -> tuple[int, Gpu]:
        """How many, and which: `2xH200`, `2×H200`, `8 x h100-80gb`; `H200` is one.

        Raises:
            UserInputError: it is not of that form, there are none, or nobody knows the GPU.
        """
        # A count needs its x: `4090` and `4090` GPUs of no name cannot be told apart otherwise.
        form = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(\S.*)", text.strip(), flags=re.IGNORECASE)
        if form is None or (form[1] is not None and int(form[1]) == 0):
            raise UserInputError(f"'{text}' names no GPUs.", fix="Write the number and the name: 2xH200.")
        return int(form[1] or 1), self.gpu(form[2])

    def cluster(self, gpu: Gpu, nodes: tuple[int, ...], network: str = "") -> Cluster:
        """Nodes of these GPUs, connected by `network` (by default InfiniBand NDR, or Ethernet for CPUs)."""
        between = network or (_DEFAULT_NETWORK if gpu.device == "cuda" else "Ethernet-10")
        return Cluster(gpu, self.link(gpu.link), self.link(between), nodes)


def for_cores(cpu: Gpu, cores: int) -> Gpu:
    """A rank with so many cores of this CPU."""
    rates = ("matmul_tflops", "attention_tflops", "varlen_tflops", "bandwidth_gbs")
    return cpu.model_copy(update={rate: cores * getattr(cpu, rate) for rate in rates})


def find_gpu(name: str) -> Gpu:
    """Of the catalogue as it is here."""
    return load_catalogue().gpu(name)


def parse_gpus(text: str) -> tuple[int, Gpu]:
    return load_catalogue().gpus_of(text)


def find_link(name: str) -> Link:
    return load_catalogue().link(name)


@cache
def shipped_cluster(machine: Machine) -> Cluster:
    """What the choices of `auto` go by: the shipped rates, and usual links, so that all ranks choose the same.

    A GPU that nobody knows is taken for an H100: choices depend on the relations between rates, which are similar.
    """
    known = _shipped_catalogue()
    if machine.device == "cpu":
        return known.cluster(known.gpus["CPU"], machine.nodes)
    gpu = next((one for one in known.gpus.values() if one.matches(machine.gpu)), known.gpus[_STAND_IN])
    return known.cluster(gpu, machine.nodes)


@cache
def load_catalogue(file: Path | None = None) -> Catalogue:
    """What is shipped, changed by `file`; without one by the user's own, if there is one.

    Raises:
        ConfigError: the file's content is wrong.
        UserInputError: it cannot be read.
    """
    top, path = _shipped(), file or USER_FILE.expanduser()
    if file is not None or path.exists():
        top = merge(top, _users(path, top))
    return _checked(top, path)


@cache
def _shipped_catalogue() -> Catalogue:
    return _checked(_shipped(), Path(_SHIPPED))


@cache
def _shipped() -> Node:
    text = files("shardtune.plan").joinpath(_SHIPPED).read_text(encoding="utf-8")
    top, _ = read_yaml(text, _SHIPPED, {})
    assert top is not None
    return top


def _users(path: Path, shipped: Node) -> Node:
    """The user's file. Of a changed entry that names no source, the file is the source; it is not measured then."""
    try:
        text = read_settings_file(path).decode()
    except (OSError, UnsuitableFileError, UnicodeDecodeError) as error:
        raise UserInputError(f"The catalogue {path} cannot be read: {error}.", fix="Check --catalogue.") from error
    top, problems = read_yaml(text, str(path), {})
    if not problems and (top is None or not top.is_mapping):
        problems = [Problem(Place(str(path)), "", "It holds no mapping.", "Write `gpus:` or `links:`.")]
    if problems or top is None:
        raise ConfigError(problems, str(path))
    for section, entries in top.value.items():
        for name, entry in entries.value.items() if entries.is_mapping else ():
            if entry.is_mapping and section in shipped.value and name in shipped.value[section].value:
                place = entry.place
                entry.value.setdefault("source", Node(f"changed in {path}", place, place))
                entry.value.setdefault("measured", Node(False, place, place))
    return top


def _checked(top: Node, path: Path) -> Catalogue:
    problems = list(top.problems())
    kinds: dict[str, type[Gpu] | type[Link]] = {"gpus": Gpu, "links": Link}
    found: dict[str, dict[str, Any]] = {section: {} for section in kinds}
    for section, entries in top.value.items():
        if section not in kinds or not entries.is_mapping:
            problems.append(Problem(entries.key_place, section, "is not `gpus:` or `links:` with entries below"))
            continue
        for name, entry in entries.value.items():
            try:
                if not entry.is_mapping:
                    raise TypeError
                found[section][name] = kinds[section](name=name, **entry.plain())
            except TypeError:
                problems.append(Problem(entry.key_place, f"{section}.{name}", "is no mapping of an entry's keys"))
            except ValidationError as error:
                problems += _problems(error, entry, f"{section}.{name}", kinds[section])
    catalogue = Catalogue(found["gpus"], found["links"])
    for name, gpu in catalogue.gpus.items():
        if not any(link.matches(gpu.link) for link in catalogue.links.values()):
            place = top.value["gpus"].value[name].value["link"].place
            problems.append(Problem(place, f"gpus.{name}.link", f"'{gpu.link}' is no link of the catalogue"))
    if problems:
        raise ConfigError(problems, str(path))
    return catalogue


def _problems(error: ValidationError, entry: Node, key: str, kind: type[_Entry]) -> list[Problem]:
    found = []
    for detail in error.errors():
        field = str(detail["loc"][0])
        node = entry.value.get(field)
        if detail["type"] == "extra_forbidden":
            meant = nearest(field, kind.model_fields)
            fix = f"did you mean {meant}?" if meant else f"known are {', '.join(kind.model_fields)}"
            found.append(Problem(node.key_place if node else entry.place, f"{key}.{field}", "is not known", fix))
        elif node is None:
            found.append(Problem(entry.key_place, f"{key}.{field}", "is missing"))
        else:
            found.append(Problem(node.place, f"{key}.{field}", f"{node.plain()!r}: {detail['msg'].lower()}"))
    return found


_E = TypeVar("_E", bound=_Entry)


def _find(name: str, entries: Mapping[str, _E], kind: str) -> _E:
    for entry in entries.values():
        if entry.matches(name):
            return entry
    known = {_plain(each): entry.name for entry in entries.values() for each in (entry.name, *entry.names)}
    meant = nearest(_plain(name), known, cutoff=0.6)
    guess = f"Did you mean {known[meant]}? " if meant else ""
    raise UserInputError(
        f"The {kind} '{name}' is not in the catalogue.",
        why=f"Known are {', '.join(entries)}.",
        fix=f"{guess}{_FORM if kind == 'GPU' else ''}Other ones can be added (docs/plan.md#step-time).",
    )


def _plain(name: str) -> str:
    """As names are compared: `NVIDIA GeForce RTX 4090` and `rtx-4090` are one."""
    return re.sub(r"^(nvidia)?(geforce)?", "", re.sub(r"[\s_-]+", "", name.lower()))
