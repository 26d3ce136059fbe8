"""What is a text once ${VAR} and ${VAR:-default} are replaced from the environment?"""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}\n]*)\}|\$\{")
_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?")


class ExpansionError(ValueError):
    """A ${...} that cannot be replaced: `what` is wrong, and `fix` says what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Replaces each ${VAR} once (replacements are not expanded again); `$${` stands for a literal `${`.

    As in a shell, `:-` gives the default for a variable that is unset or empty.

    Raises:
        ExpansionError: a variable without default is not set, or a `${` cannot be parsed.

    Example:
        >>> expand("${HOME}/runs/${NAME:-first}", {"HOME": "/home/ana"})
        '/home/ana/runs/first'
    """

    def value(match: re.Match[str]) -> str:
        if match.group() == "$${":
            return "${"
        body = match.group("body")
        literal = "for a literal `${` write `$${`"
        if body is None:
            raise ExpansionError("`${` is never closed", f"write ${{VAR}}, or {literal}")
        parts = _BODY.fullmatch(body)
        if parts is None:
            raise ExpansionError(f"`{match.group()}` does not name a variable", f"write ${{VAR}}, or {literal}")
        name, default = parts.group("name", "default")
        found = environ.get(name)
        if default is not None:
            return found or default
        if found is None:
            raise ExpansionError(
                f"the environment variable {name} is not set", f"set it, or write ${{{name}:-default}}; {literal}"
            )
        return found

    return _REFERENCE.sub(value, text)


def variables(text: str) -> list[str]:
    """The names of the variables that a text refers to.

    Example:
        >>> variables("${HOME}/$${x}/${NAME:-first}")
        ['HOME', 'NAME']
    """
    bodies = (_BODY.fullmatch(match.group("body") or "") for match in _REFERENCE.finditer(text))
    return [body.group("name") for body in bodies if body is not None]


def required_variables(text: str) -> list[str]:
    """Those of them that have no default: `expand` fails where one is not set.

    Example:
        >>> required_variables("${HOME}/${NAME:-first}")
        ['HOME']
    """
    bodies = (_BODY.fullmatch(match.group("body") or "") for match in _REFERENCE.finditer(text))
    return [body.group("name") for body in bodies if body is not None and body.group("default") is None]


def escape(text: str) -> str:
    """The text that `expand` turns back into this one."""
    return text.replace("${", "$${")
