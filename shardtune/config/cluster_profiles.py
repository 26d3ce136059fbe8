"""What does a site always want? Profiles in ~/.config/shardtune/clusters.yaml keep a run's config portable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardtune.config.problems import Place, Problem
from shardtune.config.settings_file import UnsuitableFileError, read_settings_file
from shardtune.config.suggestions import nearest
from shardtune.config.yaml_reader import Node, merge, read_yaml

_KEY = "cluster.profile"


def profiles_file(environ: Mapping[str, str]) -> Path:
    """Where profiles are: $XDG_CONFIG_HOME (or ~/.config)/shardtune/clusters.yaml."""
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(home) / "shardtune" / "clusters.yaml"


def with_profile(tree: Node, environ: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """The config with the profile that it names under its section `cluster`."""
    section = tree.value.get("cluster")
    named = section.value.get("profile") if section is not None and section.is_mapping else None
    if named is None or named.problem or not isinstance(named.value, str):
        return tree, []
    file = profiles_file(environ)
    try:
        text = read_settings_file(file).decode("utf-8-sig")
    except FileNotFoundError:
        fix = f"write it: `{named.value}:` with the settings of `cluster` under it"
        return tree, [Problem(named.place, _KEY, f"there is no file '{file}'", fix)]
    except (OSError, UnsuitableFileError, UnicodeDecodeError) as error:
        return tree, [Problem(named.place, _KEY, f"'{file}' cannot be read: {error}")]
    top, problems = read_yaml(text, str(file), environ)
    if problems or top is None or not top.is_mapping:
        what = "it holds no profiles (`name:` with settings under it)"
        return tree, problems or [Problem(Place(str(file), 1, 1), _KEY, what)]
    profile = top.value.get(named.value)
    if profile is None:
        close = nearest(named.value, top.value)
        fix = f"did you mean `{close}`?" if close else f"the profiles are {', '.join(top.value)}"
        return tree, [Problem(named.place, _KEY, f"there is no profile '{named.value}' in '{file}'", fix)]
    if not profile.is_mapping:
        return tree, [Problem(profile.place, _KEY, f"the profile '{named.value}' has no settings under it")]
    merged = merge(Node({"cluster": profile}, profile.place, profile.place), tree)
    return replace(merged, place=tree.place), []
