"""How is a resolved config saved? As YAML that can be read back, with the origin of each value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from shardtune.config.expansion import escape
from shardtune.config.references import Reference, as_text, written_settings
from shardtune.config.resolve import Origin, ResolvedConfig

# Wider values push their own comment to the right, not everybody's.
COMMENT_COLUMN = 44
_SAFE = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_SAFE_REFERENCE = re.compile(r"(?:[A-Za-z0-9_./-]|\$\{\w+(?::-[A-Za-z0-9_./-]*)?\})+")
# A number in quotes is text to YAML without a tag.
_TAGS = {int: "!!int", float: "!!float", bool: "!!bool", type(None): "!!null"}
# Words that YAML 1.1 or 1.2 readers take for something else than text.
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def render_yaml(
    resolved: ResolvedConfig, *, origins: bool = True, keep: Callable[[str], bool] = lambda path: True
) -> str:
    """The whole config as YAML, defaults included.

    Args:
        origins: End each line with a comment that says where the value came from.
        keep: Whether a setting (`cluster.nodes`) is written.

    Example:
        >>> print(render_yaml(resolved).splitlines()[1])
          model_name_or_path: gpt2                  # file: run.yaml:2:3
    """
    lines = []
    for text, comment in render_lines(resolved, keep):
        lines.append(f"{text:<{COMMENT_COLUMN}}  # {comment}" if origins and comment else text)
    return "\n".join(lines) + "\n"


def render_lines(
    resolved: ResolvedConfig, keep: Callable[[str], bool] = lambda path: True
) -> Iterator[tuple[str, str]]:
    """(YAML, comment) of each line; the comment is empty for a line that only opens a section."""
    for section, values in written_settings(resolved.config).items():
        kept = {key: value for key, value in values.items() if keep(f"{section}.{key}")}
        if kept:
            yield f"{section}:", ""
        for key, value in kept.items():
            path = f"{section}.{key}"
            if isinstance(value, dict) and value:
                yield f"  {key}:", ""
                for name, entry in value.items():
                    comment = _comment(resolved.origins.get(f"{path}.{name}", Origin("default")))
                    yield f"    {_scalar(name, is_key=True)}: {_value(entry)}", comment
            else:
                yield f"  {key}: {_value(value)}", _comment(resolved.origins[path])


def as_json(resolved: ResolvedConfig) -> dict[str, Any]:
    """The same for programs: values, origins by dotted path, notices and accelerate's verdicts."""
    from dataclasses import asdict

    return {
        "config": as_text(written_settings(resolved.config, "json")),
        "origins": {path: asdict(origin) for path, origin in resolved.origins.items()},
        "notices": list(resolved.notices),
        "verdicts": [asdict(verdict) for verdict in resolved.verdicts],
    }


def _comment(origin: Origin) -> str:
    text = f"{origin.source}: {origin.where}" if origin.where else origin.source
    return " ".join(text.split())  # a comment ends with its line


def _value(value: Any) -> str:
    """What stands behind a key. Here `${VAR}` needs no quotes, and is typed by what the variable holds next time."""
    if isinstance(value, Reference) and not value.quoted and _SAFE_REFERENCE.fullmatch(value.text):
        return value.text
    return flow(value)


def flow(value: Any) -> str:
    if isinstance(value, Reference):
        text = '"' + "".join(map(_escaped, value.text)) + '"'
        tag = _TAGS.get(value.kind, "")
        return f"{tag} {text}" if tag else text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key, is_key=True)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any, *, is_key: bool = False) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _SAFE.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return '"' + "".join(_escaped(char) for char in (text if is_key else escape(text))) + '"'


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # `1e-05` is text to a YAML 1.1 reader; `1.0e-05` is a number to all.
    return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
