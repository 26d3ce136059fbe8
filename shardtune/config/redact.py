"""What of a config may be written down? Everything but secrets: those become `***` wherever a config is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardtune.config.resolve import ResolvedConfig
from shardtune.config.schema import RunConfig

HIDDEN = "***"
# Names whose value is a secret whatever it looks like. `pad_token` and its kin are words of a vocabulary.
_SECRET_NAME = re.compile(
    r"(^|[_.-])(token|api_?key|access_?key|secret|passw(or)?d|passphrase|credentials?|private_?key|auth(orization)?)"
    r"($|[_.-](id|key|value)$)",
    re.IGNORECASE,
)
_VOCABULARY = re.compile(r"^(eos|pad|bos|unk|sep|cls|mask|image|audio|video)_token$", re.IGNORECASE)
# Values that are secrets whatever they are called; only the marked part is hidden.
_SECRET_VALUES = (
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password in a URL
    re.compile(
        r"(?i)(?<=[?&])(?:x-amz-signature|x-amz-credential|x-amz-security-token|sig|signature|token|key)=[^&\s#]+"
    ),
    re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16})\b"),
)


def redacted_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings by section and name, as JSON holds them, without secrets."""
    values = config.model_dump(mode="json")
    return {section: _hide_in(fields) for section, fields in values.items()}


def redacted(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same config without secrets, to be rendered and kept; also in the origins, which repeat what was typed."""
    values = resolved.config.model_dump(mode="json")
    secrets = [text for text in _hidden_texts(values) if text]
    origins = {
        path: replace(origin, where=_without(origin.where, secrets)) for path, origin in resolved.origins.items()
    }
    config = RunConfig.model_validate(redacted_settings(resolved.config))
    return replace(resolved, config=config, origins=origins)


def hide_text(text: str) -> str:
    """A text with what looks like a secret hidden."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(HIDDEN, text)
    return text


def _hide_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if isinstance(item, str) and item and is_secret(str(name)) else _hide_in(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_hide_in(item) for item in value]
    return hide_text(value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None and not _VOCABULARY.match(name)


def _hidden_texts(value: Any, name: str = "") -> list[str]:
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in _hidden_texts(item, str(key))]
    if isinstance(value, list):
        return [text for item in value for text in _hidden_texts(item)]
    if not isinstance(value, str):
        return []
    return [value] if is_secret(name) else []


def _without(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return hide_text(text)
