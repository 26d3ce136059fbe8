"""What are the settings of a run? The only place that sees YAML: read, merge, override, check, explain."""

from __future__ import annotations

from shardtune.config.problems import ConfigError, Place, Problem
from shardtune.config.render import render_yaml
from shardtune.config.resolve import Origin, ResolvedConfig, load_config
from shardtune.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "Origin",
    "Place",
    "Problem",
    "ResolvedConfig",
    "RunConfig",
    "load_config",
    "render_yaml",
]
