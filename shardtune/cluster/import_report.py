"""What became of each flag and field of a job that a team has today? A section `cluster`, and a verdict for each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import yaml

from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.redact import HIDDEN, hide_text, is_secret
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from rich.table import Table

VerdictName = Literal["changed", "not supported", "not known", "translated", "honoured", "no effect"]

_STYLES: dict[VerdictName, str] = {  # in the order in which they are shown
    "changed": "bold red",
    "not supported": "bold red",
    "not known": "bold red",
    "translated": "cyan",
    "honoured": "green",
    "no effect": "yellow",
}
_LONGEST_VALUE = 60
_OVERLAY = "pod_overlay"
_QUANTITIES = ("cpu", "cpu_limit", "ephemeral_storage", "extended_resources")
_PAIR = re.compile(r"([\w.-]+)=([^,\s]+)")
_KEYS = ("key", "accesskey", "secretkey")  # of --s3; `is_secret` knows names of variables
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True)
class ImportVerdict:
    """What one flag or field becomes.

    Attributes:
        sets: The setting that was written, such as `nodes: 3`; empty where there is none.
    """

    key: str
    value: str
    verdict: VerdictName
    why: str = ""
    sets: str = ""


@dataclass
class Imported:
    """A job that was read: the section as it grows, and the verdicts in the order of the flags.

    Attributes:
        section: Settings of `cluster`.
        check: By setting, what the user has to check; a comment in the YAML.
        left_out: Lines of YAML that were left out on purpose, each with the reason: comments that can be put back.
        steps: What to do before the job is submitted, as commands or sentences.
    """

    section: dict[str, Any] = field(default_factory=dict)
    check: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    verdicts: list[ImportVerdict] = field(default_factory=list)

    def add(self, key: str, value: object, verdict: VerdictName, why: str = "", sets: str = "") -> None:
        self.verdicts.append(ImportVerdict(key, shown(value), verdict, why, sets))

    def set(
        self, key: str, value: object, setting: str, becomes: Any, why: str = "", verdict: VerdictName = "honoured"
    ) -> None:
        """Write a setting. The same one from two flags with different values is reported, and the first stays."""
        if setting in self.section and self.section[setting] != becomes:
            before = shown(self.section[setting])
            self.add(key, value, "not supported", f"{setting} is already {before}; keep one of the two.")
            return
        self.section[setting] = becomes
        self.add(key, value, verdict, why, f"{setting}: {shown(becomes)}")

    def put(
        self, key: str, value: object, setting: str, name: str, becomes: str, why: str = "",
        verdict: VerdictName = "honoured",
    ) -> None:  # fmt: skip
        """Write one entry of a setting that is a mapping. The last of two wins, as in a shell and a pod."""
        self.section.setdefault(setting, {})[name] = becomes
        self.add(key, value, verdict, why, f"{setting}.{name}: {shown(becomes)}")

    def append(
        self, key: str, value: object, setting: str, becomes: Any, why: str = "", verdict: VerdictName = "honoured"
    ) -> None:
        """Write one item of a setting that is a list."""
        items = self.section.setdefault(setting, [])
        if becomes not in items:
            items.append(becomes)
        self.add(key, value, verdict, why, f"{setting}: [{shown(becomes)}]")

    def warn(self, setting: str, text: str) -> None:
        """Ask the user to check a setting."""
        before = self.check.get(setting)
        self.check[setting] = f"{before} {text}" if before else text

    def overlay(self, key: str, value: object, part: dict[str, Any], why: str = "") -> None:
        """Keep what no setting covers in `pod_overlay`, under the pod's spec."""
        spec = self.section.setdefault(_OVERLAY, {}).setdefault("spec", {})
        _merge(spec, part)
        self.add(key, value, "translated", why or "No setting covers it; it is kept as it was.", f"{_OVERLAY}.spec")


def _merge(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Deep, with lists of named things joined by name, as `pod_overlay` itself is read."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        elif isinstance(value, list) and isinstance(into.get(name), list):
            for item in value:
                same = (old for old in into[name] if isinstance(old, dict) and old.get("name") == item.get("name"))
                old = (
                    next(same, None) if isinstance(item, dict) and "name" in item and "mountPath" not in item else None
                )
                if old is None:
                    into[name].append(item)
                else:
                    _merge(old, item)
        else:
            into[name] = value


def shown(value: object) -> str:
    """A value in a message: short, and without what looks like a secret."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, dict):
        text = ", ".join(f"{name}: {shown(item)}" for name, item in value.items())
    elif isinstance(value, list):
        text = ", ".join(shown(item) for item in value)
    else:
        text = "" if value is None else str(value)
    text = hide_text(_USER_IN_URL.sub(HIDDEN, _PAIR.sub(_without_secret, " ".join(text.split()))))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _without_secret(pair: re.Match[str]) -> str:
    name = pair[1].lower()
    return f"{pair[1]}={HIDDEN}" if is_secret(name) or name in _KEYS else pair[0]


def validated(found: Imported) -> ClusterSection:
    """The section as settings.

    Raises:
        UserInputError: a value that no setting takes; the importer has to know better.
    """
    from pydantic import ValidationError

    try:
        return ClusterSection.model_validate(found.section)
    except ValidationError as error:
        wrong = [f"cluster.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserInputError(
            "What was read is not a section `cluster`.", why="\n".join(wrong), fix="Correct the flag or field."
        ) from None


def as_yaml(found: Imported) -> str:
    """The section, in the order of its reference page, with what has to be checked beside it."""
    lines = ["cluster:"]
    for setting in ClusterSection.model_fields:
        if setting not in found.section:
            continue
        if setting in found.check:
            lines += [f"  # {line}" for line in textwrap.wrap(f"CHECK: {found.check[setting]}", 110)]
        text = yaml.safe_dump(
            {setting: _as_written(setting, found.section[setting])}, sort_keys=False, allow_unicode=True, width=110
        )
        lines += [f"  {line}" for line in text.splitlines()]
    before = ""
    for line, why in found.left_out.items():
        lines += [f"  # {part}" for part in textwrap.wrap(why, 110)] if why != before else []
        lines.append(f"  # {line}")
        before = why
    return "\n".join(lines) + "\n"


def _as_written(setting: str, value: Any) -> Any:
    """Whole quantities as numbers, without quotes; texts of `env` and `labels` stay texts."""
    if setting not in _QUANTITIES:
        return value
    if isinstance(value, dict):
        return {name: _as_written(setting, amount) for name, amount in value.items()}
    return int(value) if isinstance(value, str) and re.fullmatch(r"0|[1-9]\d*", value) else value


def as_json(found: Imported) -> dict[str, Any]:
    return {
        "cluster": found.section,
        "check": found.check,
        "steps": found.steps,
        "verdicts": [vars(verdict) for verdict in found.verdicts],
    }


def verdict_table(verdicts: Iterable[ImportVerdict], source: str) -> Table:
    """The verdicts, grouped, what needs attention first. Flags with the same answer share a row.

    Args:
        source: Heading of the left column: what was read.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows: dict[tuple[VerdictName, str, str], list[ImportVerdict]] = {}
    order = list(_STYLES)
    for verdict in sorted(verdicts, key=lambda one: order.index(one.verdict)):
        rows.setdefault((verdict.verdict, verdict.sets, verdict.why), []).append(verdict)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column(source, overflow="fold", max_width=42)
    table.add_column("what it becomes, and why", overflow="fold", ratio=1)
    heading = ""
    for (name, sets, why), members in rows.items():
        if name != heading:
            table.add_section()
            table.add_row(Text(name, style=_STYLES[name]))
            heading = name
        keys = Text("\n").join(Text.assemble(one.key, " ", (one.value, "bold")) for one in members)
        becomes = Text(f"{sets}\n" if why else sets, style="bold") if sets else Text()
        table.add_row(keys, Text.assemble(becomes, why))
    return table
