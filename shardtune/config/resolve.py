"""What are the settings of a run, from all sources? Defaults < accelerate < config file < overrides, each traced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.config.cluster_profiles import with_profile
from shardtune.config.cross_checks import cross_checks
from shardtune.config.expansion import escape
from shardtune.config.extends import read_config
from shardtune.config.field_checks import Checked, check_fields
from shardtune.config.notices import notices
from shardtune.config.overrides import read_overrides
from shardtune.config.problems import ConfigError, Place, Problem
from shardtune.config.references import keep_references
from shardtune.config.schema import RunConfig
from shardtune.config.settings_file import named_path
from shardtune.config.yaml_reader import Node, merge
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from shardtune.config.accelerate_file import Translation, Verdict


_NO_EFFECT_ON_CPU = {
    "parallel.offload_params": ", so parameters are in host memory anyway",
    "train.tf32": ", and TF32 is a mode of GPUs",
    "train.torch_empty_cache_steps": ", whose memory torch does not cache",
}


@dataclass(frozen=True)
class Origin:
    """Where a value came from: the kind of source, and the spot in it (`run.yaml:3:5`, `-o train.seed=1`)."""

    source: Literal["default", "file", "override", "accelerate", "auto"]
    where: str = ""


@dataclass(frozen=True)
class ResolvedConfig:
    """A config that passed every check.

    Attributes:
        config: The values.
        origins: Where each came from, by dotted path (`train.learning_rate`, `train.optim_args.momentum`).
        notices: Settings with no effect, one sentence each.
        verdicts: What became of each key of accelerate's file.
    """

    config: RunConfig
    origins: dict[str, Origin]
    notices: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    def on_device(self, device: str) -> ResolvedConfig:
        """This config on a kind of device, with notices for settings that do nothing there. Their values stay, for a
        machine with a GPU."""
        if device != "cpu":
            return self
        given = [path for path in _NO_EFFECT_ON_CPU if self.value(path) not in (None, False, "auto")]
        notices = [f"{path} has no effect: the device is a CPU{_NO_EFFECT_ON_CPU[path]}." for path in given]
        sets = {f"{path} = true": f"The device is a CPU{_NO_EFFECT_ON_CPU[path]}." for path in given}
        verdicts = tuple(
            replace(one, verdict="no effect", why=sets[one.sets], sets="") if one.sets in sets else one
            for one in self.verdicts
        )
        return replace(self, notices=tuple(dict.fromkeys([*self.notices, *notices])), verdicts=verdicts)

    def value(self, path: str) -> object:
        """The value of `section.key`."""
        section, _, key = path.partition(".")
        return getattr(getattr(self.config, section), key)

    def with_auto(self, path: str, value: object, why: str) -> ResolvedConfig:
        """This config after an `auto` was resolved: the value set, and the reason kept as its origin.

        Example:
            >>> resolved.with_auto("train.bf16", True, "the model is held in bfloat16").config.train.bf16
            True
        """
        section, _, key = path.partition(".")
        values = self.config.model_dump()
        if key not in values.get(section, {}):
            raise KeyError(f"there is no setting {path}")
        values[section][key] = value
        config = RunConfig.model_validate(values)
        config._references = self.config._references
        return replace(self, config=config, origins={**self.origins, path: Origin("auto", why)})


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    accelerate_config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    cluster_profile: bool = False,
) -> ResolvedConfig:
    """Reads, merges and checks a run's settings.

    Args:
        path: The config file.
        overrides: `section.key=value` texts of the command line; they win over the file.
        accelerate_config: An accelerate file from the command line; wins over `parallel.accelerate_config`.
        environ: For ${VAR}, and for what `accelerate launch` hands over; the process's own if None.
        cluster_profile: Put the profile that `cluster.profile` names under the section `cluster`. Only who submits a
            job has such profiles; its pods do not.

    Raises:
        ConfigError: with every problem found.
    """
    environ = os.environ if environ is None else environ
    path = Path(path)
    tree, problems = read_config(path, environ)
    override_tree, more = read_overrides(overrides, environ)
    problems += more
    if tree is None:
        raise ConfigError(problems, str(path))
    tree = replace(merge(tree, override_tree), place=tree.place)
    if cluster_profile:
        tree, more = with_profile(tree, environ)
        problems += more
    tree, translation, more = _with_accelerate(tree, path, accelerate_config, environ)
    problems += more
    checked = check_fields(tree)
    problems += checked.problems + _cross_problems(checked, tree.place)
    if problems:
        raise ConfigError(problems, str(path))
    keep_references(checked.config, written_values(checked.leaves))
    given = {path for path, node in checked.leaves.items() if node.key_place.kind != "accelerate"}
    all_notices = (*notices(checked.config, given), *_unread_launch_settings(checked.config, environ))
    verdicts = translation.verdicts if translation is not None else ()
    resolved = ResolvedConfig(checked.config, origins_of(checked), all_notices, verdicts)
    return resolved.on_device(checked.config.parallel.device)


def written_values(leaves: Mapping[str, Node]) -> dict[str, dict[str, Any]]:
    """The settings with values from the environment, as they were written."""
    found: dict[str, dict[str, Any]] = {}
    for path, node in leaves.items():
        if node.references():
            section, _, key = path.partition(".")
            found.setdefault(section, {})[key] = node.written()
    return found


def _cross_problems(checked: Checked, top: Place) -> list[Problem]:
    """Settings that do not fit together, among those that are valid themselves."""
    found = []
    for finding in cross_checks(checked.config):
        settings = {".".join(path.split(".")[:2]) for path in finding.paths}
        if not settings & checked.wrong:
            spots = (_place(path, checked.leaves) for path in finding.paths)
            place = next((spot for spot in spots if spot is not None), top)
            found.append(Problem(place, finding.paths[0], finding.what, finding.fix))
    return found


def _place(path: str, leaves: Mapping[str, Node]) -> Place | None:
    section, key, *inner = path.split(".", 2)
    node = leaves.get(f"{section}.{key}")
    if node is None:
        return None
    entry: Node | None = node.value.get(inner[0]) if inner and node.is_mapping else None
    return entry.key_place if entry is not None else node.place


def origins_of(checked: Checked) -> dict[str, Origin]:
    """One origin per setting; a mapping such as `train.optim_args` has one per entry."""
    found: dict[str, Origin] = {}
    for section, values in checked.config:
        for key in type(values).model_fields:
            path = f"{section}.{key}"
            node = checked.leaves.get(path)
            if node is None:
                found[path] = Origin("default")
            elif node.is_mapping and node.value:
                found |= {f"{path}.{name}": _origin(entry) for name, entry in node.value.items()}
            else:
                found[path] = _origin(node)
    return found


def _origin(node: Node) -> Origin:
    return Origin(node.key_place.kind, node.key_place.as_written())


def _with_accelerate(
    tree: Node, path: Path, from_command_line: Path | None, environ: Mapping[str, str]
) -> tuple[Node, Translation | None, list[Problem]]:
    """Puts accelerate's settings, from its file or from `accelerate launch`, below the user's own."""
    tree, file, place = _accelerate_path(tree, from_command_line)
    if file is None and not _comes_from_launch(environ):
        return tree, None, []
    from shardtune.config.accelerate_file import resolve_conflicts, translate_environment, translate_file

    try:
        translation = translate_file(file) if file is not None else translate_environment(environ)
    except UserInputError as error:
        text = " ".join(part for part in (error.what, error.why) if part)
        return tree, None, [Problem(place, "parallel.accelerate_config", text, error.fix)]
    if translation is None:
        return tree, None, []
    translation = resolve_conflicts(translation, dict(_explicit(tree)))
    name = file.name if file is not None else "accelerate launch"
    reference = tree.value["parallel"].value["accelerate_config"].reference if file is not None else None
    written = reference.text if reference is not None else ""
    problems = [_accelerate_problem(name, *problem) for problem in translation.problems]
    for dotted, value in translation.values.items():
        key = translation.sources.get(dotted, "")
        source = Place(f"{name}:{key}".rstrip(":"), kind="accelerate", written=f"{written}:{key}" if written else "")
        node = _tree(value, source)
        for part in reversed(dotted.split(".")):
            node = Node({part: node}, source, source)
        tree = replace(merge(node, tree), place=tree.place)
    return tree, translation, problems


def _comes_from_launch(environ: Mapping[str, str]) -> bool:
    """A quick look, so that the translation is imported only where there may be something to translate."""
    return any(name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")) for name in environ)


def _unread_launch_settings(config: RunConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """A notice if an accelerate file is given and `accelerate launch` sets something too, which is then not read."""
    if config.parallel.accelerate_config is not None and _comes_from_launch(environ):
        from shardtune.config.accelerate_file import translate_environment

        if translate_environment(environ) is not None:
            yield "the settings of `accelerate launch` are ignored: parallel.accelerate_config takes precedence."


def _accelerate_path(tree: Node, from_command_line: Path | None) -> tuple[Node, Path | None, Place]:
    """The accelerate file, absolute in the config too, so that the resolved YAML works from anywhere.

    A path in a YAML file is relative to that file, one on the command line to the current folder.
    """
    section = tree.value.get("parallel")
    named = section.value.get("accelerate_config") if section is not None and section.is_mapping else None
    reference = None
    if from_command_line is not None:
        place = Place(f"--accelerate-config {from_command_line}", kind="override")
        file = named_path(str(from_command_line))
    elif named is not None and not named.problem and isinstance(named.value, str) and named.value:
        place, reference = named.place, named.reference
        folder = Path(place.source).parent if place.kind == "file" else Path()
        file = folder / named_path(named.value)
        if reference is not None and not named_path(named.value).is_absolute():
            reference = replace(reference, text=f"{escape(str(folder.absolute()))}/{reference.text}")
    else:
        return tree, None, tree.place
    file = file.absolute()
    key_place = named.key_place if named is not None and from_command_line is None else place
    node = Node({"accelerate_config": Node(str(file), place, key_place, reference=reference)}, place, place)
    return replace(merge(tree, Node({"parallel": node}, place, place)), place=tree.place), file, place


def _explicit(tree: Node) -> Iterator[tuple[str, Any]]:
    for section, node in tree.value.items():
        if node.is_mapping:
            yield from ((f"{section}.{key}", leaf.plain()) for key, leaf in node.value.items())


def _tree(value: Any, place: Place) -> Node:
    if isinstance(value, list):
        return Node(tuple(_tree(item, place) for item in value), place, place)
    return Node(value, place, place)


def _accelerate_problem(name: str, key: str, what: str, fix: str) -> Problem:
    """The translation has `fsdp.yaml:3: what` in one text; the report has the place in a field of its own."""
    match = re.match(rf"({re.escape(name)}(?::\d+)?): ", what)
    where = match.group(1) if match else name
    return Problem(Place(where, kind="accelerate"), key, what[match.end() :] if match else what, fix)
