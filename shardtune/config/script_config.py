"""What are the settings of a script's run? Those of its processes, its folder and its job: the model is its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardtune.config.cluster_profiles import with_profile
from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.extends import read_config
from shardtune.config.field_checks import check_fields
from shardtune.config.overrides import read_overrides
from shardtune.config.problems import ConfigError, Place, Problem
from shardtune.config.references import keep_references
from shardtune.config.render import render_yaml
from shardtune.config.resolve import ResolvedConfig, origins_of, written_values
from shardtune.config.schema import RunConfig
from shardtune.config.suggestions import FOREIGN_KEYS, nearest, section_fields
from shardtune.config.yaml_reader import Node, merge

# By section, what the launcher reads for any script; the rest of the schema says how an adapter is trained.
SCRIPT_KEYS: dict[str, tuple[str, ...]] = {
    "cluster": tuple(key for key in ClusterSection.model_fields if key != "command"),
    "parallel": (
        "nproc",
        "device",
        "load_timeout_minutes",
        "step_timeout_minutes",
        "join_timeout_minutes",
        "node_timeout_seconds",
        "max_restarts",
    ),
    "train": ("output_dir", "run_folder_access"),
}
_NO_COMMAND = "the command line after `--` is what a script's job runs"
# A RunConfig has a model and data. Those of a script are not ours to know: `is_script_setting` keeps these out of
# everything that is shown or written.
_OWN = "(the script's own)"
_UNKNOWN = {"model.model_name_or_path": _OWN, "data.dataset_name_or_path": _OWN}


def is_script_setting(path: str) -> bool:
    """Whether a script's run has this setting (`parallel.nproc`)."""
    section, _, key = path.partition(".")
    return key in SCRIPT_KEYS.get(section, ())


def is_script_config(config: RunConfig) -> bool:
    """Whether `load_script_config` has made it: its model and data are nobody's."""
    return config.model.model_name_or_path == _OWN


def load_script_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    cluster_profile: bool = False,
) -> ResolvedConfig:
    """Reads, merges and checks the settings of a script's run: `shardtune run` and `shardtune submit … -- script.py`.

    Everything else of a config is refused, because it would have no effect on a script. In the result it is at its
    default; `render_yaml(resolved, keep=is_script_setting)` leaves it out.

    Args:
        path: The config file; None for the overrides alone.
        overrides: `section.key=value` texts of the command line; they win over the file.
        environ: For ${VAR}; the process's own if None.
        cluster_profile: As for `load_config`.

    Raises:
        ConfigError: with every problem found.
    """
    environ = os.environ if environ is None else environ
    subject = str(path) if path is not None else "the command line"
    nowhere = Place(subject, kind="file" if path is not None else "override")
    tree, problems = read_config(path, environ, of_script=True) if path is not None else (_empty(nowhere), [])
    override_tree, more = read_overrides(overrides, environ)
    problems += more
    if tree is None:
        raise ConfigError(problems, subject, whole=True)
    tree = replace(merge(tree, override_tree), place=tree.place)
    if cluster_profile:
        tree, more = with_profile(tree, environ)
        problems += more
    tree, more = _without_others(tree)
    checked = check_fields(merge(_unknown(nowhere), tree))
    problems += [*more, *checked.problems]
    if problems:
        raise ConfigError(problems, subject, whole=True)
    for unknown in _UNKNOWN:
        del checked.leaves[unknown]
    keep_references(checked.config, written_values(checked.leaves))
    return ResolvedConfig(checked.config, origins_of(checked))


def script_yaml(resolved: ResolvedConfig) -> str:
    """The settings of a script's run as YAML that `load_script_config` reads back, defaults included."""
    return render_yaml(resolved, origins=False, keep=is_script_setting)


def _without_others(tree: Node) -> tuple[Node, list[Problem]]:
    """The sections of a script's run, and a problem for everything that is not theirs."""
    kept: dict[str, Node] = {}
    problems: list[Problem] = []
    for name, node in tree.value.items():
        if name not in SCRIPT_KEYS and name != "extends":
            problems.append(_problem(name, node, name in section_fields()))
        elif node.is_mapping and name in SCRIPT_KEYS:
            fields = section_fields()[name].model_fields
            others = {key: value for key, value in node.value.items() if key not in SCRIPT_KEYS[name]}
            problems += [_problem(f"{name}.{key}", value, key in fields) for key, value in others.items()]
            own = {key: value for key, value in node.value.items() if key not in others}
            kept[name] = replace(node, value=own)
        else:
            kept[name] = node  # for `check_fields` to report
    return replace(tree, value=kept), problems


def _problem(path: str, node: Node, of_training: bool) -> Problem:
    section, _, key = path.rpartition(".")
    if path == "cluster.command":
        return Problem(node.key_place, path, f"no effect: {_NO_COMMAND}", "remove it")
    if of_training:
        what = "no effect on a script: it belongs to `shardtune train`"
        return Problem(node.key_place, path, what, f"remove it; {_settings_of(section)}")
    return Problem(node.key_place, path, "unknown key", _meant(key, section))


def _meant(key: str, section: str) -> str:
    """Which setting of a script's run an unknown key stands for; `section` is "" at the top of the file."""
    everywhere = {name: f"{owner}.{name}" for owner, names in SCRIPT_KEYS.items() for name in names}
    foreign = FOREIGN_KEYS.get(key, "")
    close = nearest(key, SCRIPT_KEYS[section] if section else SCRIPT_KEYS)
    elsewhere = nearest(key, everywhere, cutoff=0.8)
    meant = close or (is_script_setting(foreign) and foreign) or (elsewhere and everywhere[elsewhere])
    return f"did you mean `{meant}`?" if meant else _settings_of(section)


def _settings_of(section: str) -> str:
    if section not in ("parallel", "train"):
        return f"the sections of a script's run are {', '.join(SCRIPT_KEYS)}"
    return f"of `{section}`, a script's run has {', '.join(SCRIPT_KEYS[section])}"


def _empty(place: Place) -> Node:
    return Node({}, place, place)


def _unknown(place: Place) -> Node:
    tree = _empty(place)
    for path, value in _UNKNOWN.items():
        section, _, key = path.partition(".")
        tree = merge(tree, Node({section: Node({key: Node(value, place, place)}, place, place)}, place, place))
    return tree
