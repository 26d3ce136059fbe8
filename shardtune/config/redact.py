"""What of a config may be saved? References such as `${VAR}` as they were written, and `***` for secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardtune.config.references import Reference, as_text, replaced, written_settings
from shardtune.config.schema import RunConfig

if TYPE_CHECKING:
    from shardtune.config.resolve import ResolvedConfig

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


_ONLY_REFERENCES = re.compile(r"(?:\$\{\w+\})+")


def redacted_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings by section and name, as JSON holds them: references as they were written, no secrets."""
    values = written_settings(config, "json")
    return {section: as_text(_hide_in(fields)) for section, fields in values.items()}


def redacted_values(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The same with what references stand for. For comparison only, never saved."""
    return {section: _hide_in(fields) for section, fields in config.model_dump(mode="json").items()}


def redacted(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same config without secrets, to be rendered and kept; also in the origins, which repeat what was typed."""
    secrets = [text for text in _hidden_texts(resolved.config.model_dump(mode="json")) if text]
    origins = {
        path: replace(origin, where=_without(origin.where, secrets)) for path, origin in resolved.origins.items()
    }
    written = _hide_in(written_settings(resolved.config))
    config = RunConfig.model_validate(replaced(written, lambda reference: reference.value))
    config._references = written
    return replace(resolved, config=config, origins=origins)


def hide_values(text: str, config: RunConfig) -> str:
    """A text, such as the command line, without the secrets that this config holds."""
    return _without(text, [secret for secret in _hidden_texts(config.model_dump(mode="json")) if secret])


def hide_text(text: str) -> str:
    """A text with what looks like a secret hidden; `https://me:${PASSWORD}@host` holds none."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(_hidden, text)
    return text


def _hidden(match: re.Match[str]) -> str:
    secret = re.split("[:=]", match.group(), maxsplit=1)[-1]
    return match.group() if _ONLY_REFERENCES.fullmatch(secret) else HIDDEN


def _hide_in(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _hide_in(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_in(item) for item in value]
    if isinstance(value, Reference):
        return _hide_in_reference(value, name)
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else hide_text(value)
    return value


def _hide_in_reference(reference: Reference, name: str) -> Any:
    if not is_secret(name):
        return replace(reference, text=hide_text(reference.text), value=_hide_in(reference.value))
    # `${HF_TOKEN}` says nothing of the token; `${HF_TOKEN:-hf_abc}` and `hf_${REST}` do.
    text = reference.text
    return replace(reference, value=text) if _ONLY_REFERENCES.fullmatch(text) else HIDDEN


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
