"""What does an accelerate config file ask for? Translates its keys to shardtune's settings, with a verdict for each.

The keys come from the file itself (`--accelerate-config fsdp.yaml`), or from the environment variables in which
`accelerate launch --config_file fsdp.yaml -m shardtune train …` passes the same file to its workers. Both become one
list of `_Entry` and go through the table in `accelerate_keys`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shardtune.config.accelerate_keys import (
    ACCELERATE_VARIABLES,
    ALL_PROCESSES,
    ANY,
    EMPTY,
    ENGINE_VARIABLES,
    FROM_FILE,
    FSDP_VARIABLES,
    LAUNCH_DEFAULTS,
    OTHER_SPELLINGS,
    PARALLELISM_VARIABLES,
    SECTIONS,
    VARIABLES,
    WRITTEN_BY_DEFAULT,
    Key,
    Meaning,
    VerdictName,
)
from shardtune.config.settings_file import UnsuitableFileError, read_settings_file
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "ACCELERATE_VARIABLES",
    "Translation",
    "Verdict",
    "neutralise",
    "reference_page",
    "resolve_conflicts",
    "translate_environment",
    "translate_file",
    "verdict_line",
    "verdict_table",
]

_TRUE = ("true", "yes", "y", "t", "on", "1")
_FALSE = ("false", "no", "n", "f", "off", "0")
_REMOVE = "Remove it."


@dataclass(frozen=True)
class Verdict:
    """What one key becomes: `sets` names the shardtune setting, such as `parallel.reshard_after_forward = true`."""

    key: str
    value: str
    verdict: VerdictName
    why: str
    sets: str = ""


@dataclass(frozen=True)
class Translation:
    """A whole file, translated.

    Args:
        values: Dotted shardtune path -> value.
        verdicts: One for each key that is no problem, in the file's order.
        problems: (key, what is wrong, what to change): each must stop the run.
        sources: Dotted shardtune path -> the key in the file that set it.
        overridden_by: Problem -> (shardtune path, value in the file), for a problem that goes away when the
            user sets that path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    problems: tuple[tuple[str, str, str], ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    overridden_by: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Entry:
    """One key and value as written. `where` is `file:line: `, or empty for a variable; `note` joins the reason."""

    label: str
    key: Key
    value: Any
    where: str = ""
    note: str = ""
    is_launch_default: bool = False


_Problem = tuple[str, str, str]


# --- the file -------------------------------------------------------------------------------------------------------


def translate_file(path: Path) -> Translation:
    """Translate accelerate's YAML at `path`.

    Raises:
        UserInputError: the file is missing, unreadable, empty, not YAML, or not a mapping. What is wrong with single
            keys is collected in `Translation.problems` instead, so that all of it is reported at once.
    """
    content, lines, twice = _read(path)
    problems = [
        (key, f"{path.name}:{line}: the key is given twice", "Keep one; accelerate would silently use the last.")
        for key, line in twice
    ]
    entries, unknown = _entries_of_file(content, lines, path.name)
    if not entries and all(fix == _REMOVE for _, _, fix in unknown):
        # Any file may be named in a config; its keys are not listed unless one of them is, or nearly is, accelerate's.
        raise UserInputError(
            f"'{path}' is not an accelerate config.",
            why="It has none of accelerate's keys.",
            fix="Name a file that `accelerate config` wrote.",
        )
    return _translate(entries, [*problems, *unknown])


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int], list[tuple[str, int]]]:
    """The file's mapping, the line of each key (as a path of keys), and the keys given twice."""
    try:
        text = read_settings_file(path).decode("utf-8")
    except FileNotFoundError as error:
        raise UserInputError(
            f"The accelerate config '{path}' does not exist.",
            fix="Check the path. `accelerate config --config_file fsdp.yaml` writes such a file.",
        ) from error
    except UnsuitableFileError as error:
        raise UserInputError(f"The accelerate config '{path}' {error}.", fix="Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"The accelerate config '{path}' cannot be read as text.", why=str(error)) from error
    try:
        content = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _broken_yaml(path, text, error) from error
    if content is None or content == {}:
        raise UserInputError(
            f"The accelerate config '{path}' is empty.",
            fix="Fill it (`accelerate config --config_file fsdp.yaml` does), or leave the option out.",
        )
    if not isinstance(content, dict):
        raise UserInputError(
            f"The accelerate config '{path}' is not a mapping of keys to values.",
            why=f"It holds a {type(content).__name__}.",
            fix="Write one `key: value` per line, such as `distributed_type: FSDP`.",
        )
    lines, twice = _key_lines(node)
    return {str(key): value for key, value in content.items()}, lines, twice


def _broken_yaml(path: Path, text: str, error: Exception) -> UserInputError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
    line = text.splitlines()[mark.line] if mark is not None and mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return UserInputError(
            f"{where}: a tab where YAML wants spaces.",
            why="YAML does not allow tabs for indentation.",
            fix="Replace each tab at the start of a line with two spaces.",
        )
    # Words of the file are left out: it may be anything that a config names, a private key too.
    reason = re.sub(r"""(['"]).*\1""", "…", getattr(error, "problem", None) or type(error).__name__)
    return UserInputError(
        f"{where}: the accelerate config is not valid YAML.",
        why=f"{reason[:1].upper()}{reason[1:]}.",
        fix="Correct that line; nested keys are indented by two spaces, and a colon is followed by a space.",
    )


def _key_lines(node: yaml.Node | None) -> tuple[dict[tuple[str, ...], int], list[tuple[str, int]]]:
    lines: dict[tuple[str, ...], int] = {}
    twice: list[tuple[str, int]] = []

    def visit(mapping: yaml.MappingNode, parents: tuple[str, ...]) -> None:
        for key_node, value_node in mapping.value:
            here = (*parents, str(key_node.value))
            line = key_node.start_mark.line + 1
            if here in lines:
                twice.append((here[-1], line))
            lines[here] = line
            if isinstance(value_node, yaml.MappingNode):
                visit(value_node, here)

    if isinstance(node, yaml.MappingNode):
        visit(node, ())
    return lines, twice


def _entries_of_file(
    content: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], file: str
) -> tuple[list[_Entry], list[_Problem]]:
    entries: list[_Entry] = []
    problems: list[_Problem] = []
    for section, label, value in _walk(content):
        line = lines.get((section, label) if section else (label,))
        where = f"{file}:{line}: " if line else f"{file}: "
        name = _canonical(section, label)
        if key := SECTIONS[section].get(name):
            note = ""
            if name != label and OTHER_SPELLINGS.get(_prefixed(section, label)):
                note = f"Read as {name}; accelerate drops this spelling silently."
            entries.append(_Entry(label, key, value, where, note))
        else:
            problems.append(_unknown_key(section, label, where))
    return entries, [*problems, *_given_twice(entries)]


def _walk(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) in the file's order; the sections whose keys matter one by one are opened."""
    for label, value in content.items():
        if label in SECTIONS and label and isinstance(value, dict) and value:
            for inner, inner_value in value.items():
                yield label, str(inner), inner_value
        else:
            yield "", label, value


def _prefixed(section: str, label: str) -> str:
    # accelerate's own rule (commands/launch.py): inside fsdp_config the prefix may be left out.
    return f"fsdp_{label}" if section == "fsdp_config" and not label.startswith("fsdp") else label


def _canonical(section: str, label: str) -> str:
    name = _prefixed(section, label)
    return OTHER_SPELLINGS.get(name, name) if section == "fsdp_config" else name


def _unknown_key(section: str, label: str, where: str) -> _Problem:
    for other, keys in SECTIONS.items():
        if other != section and _canonical(other, label) in keys:
            place = f"under `{other}:`" if other else "at the top level, not indented"
            return label, f"{where}the key is in the wrong place", f"Move it {place}."
    what = f"{where}accelerate has no such key" + (f" in {section}" if section else "")
    known = [*SECTIONS[section], *(name.removeprefix("fsdp_") for name in SECTIONS[section])]
    near = difflib.get_close_matches(label, known, n=1, cutoff=0.6)
    if near:
        return label, what, f"Did you mean `{near[0]}`?"
    return label, what, _REMOVE


def _given_twice(entries: Iterable[_Entry]) -> list[_Problem]:
    """Two spellings of one key (`fsdp_offload_params` and `offload_params`); accelerate would take the last."""
    seen: dict[str, str] = {}
    problems = []
    for entry in entries:
        if entry.key.name in seen:
            other = seen[entry.key.name]
            problems.append((entry.label, f"{entry.where}the same setting as `{other}`", "Keep one of the two."))
        seen.setdefault(entry.key.name, entry.label)
    return problems


# --- the environment ------------------------------------------------------------------------------------------------


def translate_environment(environ: Mapping[str, str]) -> Translation | None:
    """What `accelerate launch` handed to this worker; None if nothing was set.

    `accelerate launch` fills every variable, set or not, so a value that is its default is taken as unset.
    (`fsdp_forward_prefetch: false` and `mixed_precision: no` are then reported as not used.) The
    number of processes is not read: they are running already.
    """
    entries = list(_entries_of_environment(environ))
    if all(entry.is_launch_default for entry in entries):
        return None
    return _translate(entries, [], running=_whole_number(environ.get("WORLD_SIZE")))


def _entries_of_environment(environ: Mapping[str, str]) -> Iterator[_Entry]:
    engines = [name for name in ENGINE_VARIABLES if _is_true(environ.get(name, ""))]
    for variable in engines:
        yield _Entry(variable, SECTIONS[""]["distributed_type"], ENGINE_VARIABLES[variable])
    tables = [("", VARIABLES)]
    if "ACCELERATE_USE_FSDP" in engines:
        tables.append(("fsdp_config", FSDP_VARIABLES))
    if _is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "")):
        tables.append(("parallelism_config", PARALLELISM_VARIABLES))
    for section, table in tables:
        for variable, name in table.items():
            value = environ.get(variable, "")
            if not value or value == "None":
                continue
            default = LAUNCH_DEFAULTS.get(variable)
            unset = default is not None and value.lower() == default.value
            if default is None or not unset or default.report:
                yield _Entry(variable, SECTIONS[section][name], value, is_launch_default=unset)


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


def neutralise(environ: MutableMapping[str, str]) -> list[str]:
    """Take out of `environ` what transformers and accelerate would act on; returns the names taken out."""
    taken = [name for name in environ if name in ACCELERATE_VARIABLES or name.startswith("ACCELERATE_FP8_")]
    for name in taken:
        del environ[name]
    return taken


# --- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Situation:
    """What other keys must be known to interpret one."""

    machines: int
    processes: int | None
    version: int
    launch: Mapping[str, object]


def _situation(entries: Iterable[_Entry], running: int | None) -> _Situation:
    given = {entry.key.name: entry.value for entry in entries}
    machines = max(1, _whole_number(given.get("num_machines")) or 1)
    processes = running or _whole_number(given.get("num_processes"))
    launch = {
        "nodes": machines,
        "address": given.get("main_process_ip") or "HOST",
        "port": given.get("main_process_port") or 29500,
    }
    return _Situation(machines, processes, _whole_number(given.get("fsdp_version")) or 1, launch)


def _translate(entries: list[_Entry], problems: list[_Problem], running: int | None = None) -> Translation:
    """Look up each entry; `running` is the number of processes where they are already there."""
    situation = _situation(entries, running)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    overridden_by: dict[_Problem, tuple[str, str]] = {}
    verdicts: list[Verdict] = []
    implied: list[tuple[_Entry, str, Any]] = []
    problems = list(problems)
    winners = _winners(entries, situation)
    for entry in entries:
        meaning = _meaning(entry, situation)
        if meaning.verdict == "problem":
            problem = (entry.label, f"{entry.where}`{_show(entry.value)}`: {meaning.why}.", meaning.change)
            problems.append(problem)
            if entry.key.overridden_by:
                overridden_by[problem] = (entry.key.overridden_by, _show(entry.value))
            continue
        winner = winners.get(meaning.path, entry)
        if meaning.path and winner.key is not entry.key:
            meaning = _overruled(meaning, winner, _meaning(winner, situation), situation)
        elif meaning.path:
            values.setdefault(meaning.path, meaning.value)
            sources.setdefault(meaning.path, entry.label)
            if meaning.also is not None:
                implied.append((entry, *meaning.also))
        verdicts.append(_verdict(entry, meaning, situation))
    for entry, path, value in implied:
        values.setdefault(path, value)
        sources.setdefault(path, entry.label)
    problems += _wrong_mesh(entries, situation, values)
    return _without_moot(Translation(values, tuple(verdicts), tuple(problems), sources, overridden_by), values)


def _wrong_mesh(entries: list[_Entry], situation: _Situation, values: dict[str, Any]) -> Iterator[_Problem]:
    """Replicas × shards must be all processes, as in accelerate; where one is not given, it follows from the other."""
    given = {entry.key.name.rpartition("config_")[2]: entry for entry in entries if "_dp_" in entry.key.name}
    numbers = {name: number for name, entry in given.items() if (number := _whole_number(entry.value)) is not None}
    replicas, processes = numbers.get("dp_replicate_size", 1), situation.processes
    if not numbers or (replicas == 1 and processes is None):
        return
    label, product = next(iter(given.values())).label, prod(numbers.values())
    if processes is None:
        if len(numbers) == 1:
            yield label, f"{replicas} replicas of an unknown number of processes.", "Give num_processes too."
    elif processes % product or (len(numbers) == 2 and product != processes):
        shown = " × ".join(f"{name} {number}" for name, number in numbers.items())
        yield label, f"{shown} does not fit num_processes: {processes}.", "Make the product of the two num_processes."
    elif 1 < replicas < processes:
        values.setdefault("parallel.shard_size", processes // replicas)


def _without_moot(translation: Translation, settings: Mapping[str, Any]) -> Translation:
    """Without what has no effect in the mode of sharding that `settings` has."""
    shard = settings.get("parallel.shard")
    unused = {"parallel.shard_size"} if shard in ("auto", "full", "replicate") else set()
    if shard == "replicate":
        unused.add("parallel.reshard_after_forward")
    moot = unused & set(translation.values)
    verdicts = [
        replace(verdict, verdict="no effect", why=f"It does nothing with parallel.shard: {shard}.", sets="")
        if verdict.sets.partition(" = ")[0] in moot
        else verdict
        for verdict in translation.verdicts
    ]
    return replace(
        translation,
        values={path: value for path, value in translation.values.items() if path not in moot},
        verdicts=tuple(verdicts),
        sources={path: key for path, key in translation.sources.items() if path not in moot},
    )


def _verdict(entry: _Entry, meaning: Meaning, situation: _Situation) -> Verdict:
    assert meaning.verdict != "problem"
    reasons = [meaning.why, entry.note]
    if situation.machines > 1:
        reasons.append(entry.key.many_machines.format_map(situation.launch))
    sets = f"{meaning.path} = {_show(meaning.value)}" if meaning.path else ""
    if meaning.also is not None:
        sets += f", {meaning.also[0]} = {_show(meaning.also[1])}"
    return Verdict(entry.label, _show(entry.value), meaning.verdict, " ".join(filter(None, reasons)), sets)


def _meaning(entry: _Entry, situation: _Situation) -> Meaning:
    key = entry.key
    if entry.value is None:
        return Meaning("no effect", "null sets nothing; shardtune's own setting applies.")
    spelled = _spell(key, entry.value)
    if spelled is None:
        return Meaning("problem", f"not a value of `{key.name}`", change=f"Allowed: {key.allowed}.")
    meaning = key.values.get(spelled) or key.values[ANY]
    if key.name == "num_processes" and meaning.path:
        return _share_of_processes(meaning, int(spelled), situation.machines)
    if ALL_PROCESSES in key.values and spelled == str(situation.processes):
        return key.values[ALL_PROCESSES]
    if meaning.value is FROM_FILE:
        meaning = replace(meaning, value=int(spelled) if key.kind == "number" else _names(entry.value))
    if entry.is_launch_default and meaning.path:
        why = f"`accelerate launch` writes this value even if nobody set it: set {meaning.path} yourself."
        return Meaning("no effect", why)
    return meaning


def _spell(key: Key, value: Any) -> str | None:
    """The value in the table's spelling; None when it is not one this key takes."""
    if key.kind == "section":
        return EMPTY if value == {} else ANY if isinstance(value, dict) and ANY in key.values else None
    if key.kind == "names":
        return ANY if _names(value) else None
    if key.kind == "number":
        number = _whole_number(value)
        allowed = number is not None and (number >= key.minimum or str(number) in key.values)
        return str(number) if allowed else None
    word = "true" if value is True else "false" if value is False else str(value).strip()
    word = key.aliases.get(word, word)
    known = {name.lower(): name for name in key.values}
    if word.lower() in known:
        return known[word.lower()]
    # accelerate reads `yes`, `on`, `1` as true; and a bare `no` is the boolean false in YAML 1.1.
    for words, names in ((_TRUE, ("true",)), (_FALSE, ("false", "no"))):
        if word.lower() in words and (found := next((known[name] for name in names if name in known), None)):
            return found
    return ANY if ANY in key.values else None


def _whole_number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(str(value).strip())
    except ValueError:
        return None


def _names(value: Any) -> str | list[str] | None:
    """`A`, `A,B` or a list, as one name or a list of names."""
    parts = value if isinstance(value, list) else str(value).split(",")
    if isinstance(value, bool | int | float | dict) or not all(isinstance(part, str) for part in parts):
        return None
    names = [part.strip() for part in parts if part.strip()]
    return names[0] if len(names) == 1 else names or None


def _share_of_processes(meaning: Meaning, processes: int, machines: int) -> Meaning:
    if processes % machines:
        # accelerate rounds down and starts fewer processes than asked, silently.
        return Meaning(
            "problem",
            f"{processes} processes cannot be shared evenly by {machines} machines",
            change=f"Make num_processes a multiple of {machines}, or correct num_machines.",
        )
    why = meaning.why if machines == 1 else f"{processes} processes on {machines} machines."
    return replace(meaning, value=processes // machines, why=why)


def _winners(entries: list[_Entry], situation: _Situation) -> dict[str, _Entry]:
    """Which key decides a setting that two keys of the file set differently: the one accelerate would follow."""
    # With fsdp_version 1 accelerate follows fsdp_sharding_strategy, with 2 fsdp_reshard_after_forward.
    first = "fsdp_sharding_strategy" if situation.version == 1 else "fsdp_reshard_after_forward"
    deciders: dict[str, list[tuple[_Entry, Any]]] = {}
    for entry in entries:
        meaning = _meaning(entry, situation)
        if meaning.verdict != "problem" and meaning.path:
            deciders.setdefault(meaning.path, []).append((entry, meaning.value))
    winners = {}
    for path, candidates in deciders.items():
        if any(value != candidates[0][1] for _, value in candidates):
            winners[path] = next((entry for entry, _ in candidates if entry.key.name == first), candidates[0][0])
    return winners


def _overruled(meaning: Meaning, winner: _Entry, decision: Meaning, situation: _Situation) -> Meaning:
    if meaning.value == decision.value:
        return meaning
    value, version = _show(winner.value), situation.version
    why = f"{winner.label}: {value} takes precedence, as in accelerate with fsdp_version {version}."
    return Meaning("conflicts", why, meaning.path, decision.value)


def resolve_conflicts(translation: Translation, explicitly_set: dict[str, Any]) -> Translation:
    """Let the user's own settings win over the accelerate file's.

    Where they differ the key's verdict becomes "conflicts" and names the value that won, and the path leaves `values`
    and `sources`. Where they agree nothing changes. A problem the user's own setting makes moot (`mixed_precision:
    fp16` with an explicit train.bf16) becomes a conflict too.
    """
    translation = _without_moot(translation, explicitly_set)
    lost = {
        path: explicitly_set[path]
        for path, value in translation.values.items()
        if path in explicitly_set and not _same(value, explicitly_set[path])
    }
    verdicts = []
    for verdict in translation.verdicts:
        path = verdict.sets.partition(" = ")[0]
        verdicts.append(_lost_to(path, lost[path], verdict.key, verdict.value) if path in lost else verdict)
    for problem, (path, value) in translation.overridden_by.items():
        if path in explicitly_set:
            verdicts.append(_lost_to(path, explicitly_set[path], problem[0], value))
    return Translation(
        {path: value for path, value in translation.values.items() if path not in lost},
        tuple(verdicts),
        tuple(p for p in translation.problems if translation.overridden_by.get(p, ("", ""))[0] not in explicitly_set),
        {path: key for path, key in translation.sources.items() if path not in lost},
        {problem: by for problem, by in translation.overridden_by.items() if by[0] not in explicitly_set},
    )


def _lost_to(path: str, own: Any, key: str, value: str) -> Verdict:
    return Verdict(
        key, value, "conflicts", "Your own setting takes precedence over the accelerate file.", f"{path} = {_show(own)}"
    )


def _same(value: Any, other: Any) -> bool:
    return bool(_plain(value) == _plain(other))


def _plain(value: Any) -> Any:
    """One form for the ways of writing a value: `"true"` and True, `"2"` and 2, `"A,B"` and [A, B]."""
    if isinstance(value, list):
        return [str(part) for part in value]
    word = _show(value).strip().lower() if isinstance(value, bool | int) else str(value).strip()
    if word.lower() in ("true", "false"):
        return word.lower()
    return [part.strip() for part in word.split(",") if part.strip()]


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return ", ".join(str(key) for key in value) or "{}"
    if isinstance(value, list):
        return ", ".join(str(part) for part in value) or "[]"
    return str(value)


# --- for people -----------------------------------------------------------------------------------------------------

_ORDER: dict[str, tuple[int, str]] = {
    "conflicts": (0, "bold red"),
    "honoured": (1, "green"),
    "implied by FSDP2": (2, "cyan"),
    "no effect": (3, "yellow"),
}


def verdict_line(verdicts: Iterable[Verdict]) -> str:
    """How many keys have which verdict; by name, those that lost to another value and those that do nothing.

    What `accelerate config` writes into every file is only counted: nobody asked for it.
    """
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for one in sorted(verdicts, key=lambda verdict: _ORDER[verdict.verdict][0]):
        counts[one.verdict] = counts.get(one.verdict, 0) + 1
        if one.verdict == "conflicts":
            names.setdefault(one.verdict, []).append(f"{one.key}: {one.value}, but {one.sets} wins")
        elif one.verdict == "no effect" and WRITTEN_BY_DEFAULT.get(one.key) != one.value:
            names.setdefault(one.verdict, []).append(one.key)
    joints = {"conflicts": "; ", "no effect": ", "}
    listed = {name: f" ({joints[name].join(words)})" for name, words in names.items()}
    return ", ".join(
        f"{count} {'conflict' if (name, count) == ('conflicts', 1) else name}{listed.get(name, '')}"
        for name, count in counts.items()
    )


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """The verdicts as a table that reads at 80 columns: key and value, and what they become and why, by verdict.

    Keys with the same answer share a row (the TPU keys in every file `accelerate config` writes); what conflicts comes
    first, what has no effect last. The verdict heads its group: a column of its own would leave 25 columns for the
    reasons beside keys of up to 38.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: _ORDER[verdict.verdict][0]):
        rows.setdefault((verdict.verdict, verdict.sets, verdict.why), []).append(verdict)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("accelerate says", overflow="fold", max_width=38)
    table.add_column("what it becomes, and why", overflow="fold", ratio=1)
    heading = ""
    for (name, sets, why), members in rows.items():
        if name != heading:
            table.add_section()
            table.add_row(Text(name, style=_ORDER[name][1]))
            heading = name
        keys = Text("\n").join(_key_and_value(member) for member in members)
        becomes = Text(f"{sets}\n", style="bold") if sets else Text()
        table.add_row(keys, Text.assemble(becomes, why))
    return table


def _key_and_value(verdict: Verdict) -> Any:
    from rich.text import Text

    # A long pair is broken after the colon, so that neither key nor value is cut in its middle.
    gap = " " if len(verdict.key) + len(verdict.value) <= 36 else "\n  "
    return Text.assemble(verdict.key, (f":{gap}", "dim"), (verdict.value, "bold"))


_PAGE_HEAD = """\
# Accelerate's config file, key by key

<!-- Generated: python -m shardtune.config.accelerate_file > docs/accelerate-files.md -->

`shardtune train CONFIG --accelerate-config fsdp.yaml` (or `parallel.accelerate_config` in your YAML) reads the file
that `accelerate config` writes, in its FSDP2 form (`fsdp_version: 2`) and the older FSDP1 form. Started through
`accelerate launch --config_file fsdp.yaml -m shardtune train CONFIG`, it takes the same settings from the environment
that `accelerate launch` prepares. Every key gets an answer:

| verdict | meaning |
|---|---|
| honoured | It takes effect; where it becomes a setting of shardtune, that setting is named. |
| implied by FSDP2 | FSDP2 always works that way. |
| no effect | It is ignored, and the reason is given. |
| conflicts | Your own YAML or `--override` (or another key of the file) takes precedence. |
| **stops** | The run does not start until it is changed. |

An unknown key stops the run and names the nearest known one (accelerate drops unknown keys of `fsdp_config` silently).
Inside `fsdp_config` the prefix `fsdp_` may be left out. `null` sets nothing.

Through `accelerate launch`, a value that is that command's own default sets nothing, as nobody may have asked for it:
write `parallel.forward_prefetch: 0` or `train.bf16: false` in your own YAML if you mean them.
`fsdp_limit_all_gathers` and `fsdp_state_dict_cpu_offload` never reach the workers that way.
"""

_SECTION_TITLES = {
    "fsdp_config": "In `fsdp_config`",
    "": "At the top level",
    "parallelism_config": "In `parallelism_config`",
}


def reference_page() -> str:
    """docs/accelerate-files.md, from the table itself."""
    parts = [_PAGE_HEAD]
    for section, title in _SECTION_TITLES.items():
        parts.append(f"\n## {title}\n\n| key | value | verdict | becomes | why |\n|---|---|---|---|---|\n")
        parts.extend(f"| {' | '.join(_page_cells(*row))} |\n" for row in _page_rows(section))
    spellings = ", ".join(f"`{other}` = `{name}`" for other, name in OTHER_SPELLINGS.items())
    parts.append(f"\nOther spellings that are understood (accelerate drops them silently): {spellings}.\n")
    return "".join(parts)


def _page_rows(section: str) -> list[tuple[list[Key], list[str], Meaning]]:
    """One row for each answer of each key; keys with the same answer to any value share one."""
    rows: list[tuple[list[Key], list[str], Meaning]] = []
    for key in SECTIONS[section].values():
        answers: dict[Meaning, list[str]] = {}
        for value, meaning in key.values.items():
            answers.setdefault(meaning, []).append(value)
        for meaning, values in answers.items():
            shown = ["any"] if len(answers) == 1 and EMPTY not in values else values
            same = next((keys for keys, v, m in rows if v == shown and m == meaning and v[0] in ("any", EMPTY)), None)
            if same is None:
                rows.append(([key], shown, meaning))
            else:
                same.append(key)
    return rows


def _page_cells(keys: list[Key], values: list[str], meaning: Meaning) -> tuple[str, ...]:
    names = ", ".join(f"`{key.name}`" for key in keys)
    spelled = ", ".join(value if value in ("any", ANY, EMPTY) else f"`{value}`" for value in values)
    if meaning.verdict == "problem":
        start = meaning.why if meaning.why.startswith("shardtune") else f"{meaning.why[:1].upper()}{meaning.why[1:]}"
        return names, spelled, "**stops**", "", f"{start}. {meaning.change}"
    becomes = ""
    if meaning.path:
        value = "its value" if meaning.value is FROM_FILE else _show(meaning.value)
        share = " / num_machines" if meaning.path == "parallel.nproc" else ""
        becomes = f"`{meaning.path}` = {value}{share}"
        if meaning.also is not None:
            becomes += f", `{meaning.also[0]}` = {_show(meaning.also[1])}"
    more = ""
    if meaning.path == "cluster.nodes":
        more = " " + keys[0].many_machines.format(nodes="N", address="HOST", port="PORT")
    return names, spelled, meaning.verdict, becomes, f"{meaning.why}{more}"


if __name__ == "__main__":
    print(reference_page(), end="")
