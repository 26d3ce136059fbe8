"""Would a secret be readable by everyone who may look at the job? And does the pod have what its config refers to?

No finding repeats a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, warning
from shardtune.cluster.pod import container_command
from shardtune.config.expansion import required_variables, variables
from shardtune.config.redact import hide_text, is_secret
from shardtune.config.references import Reference

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject

RULES = (
    Rule(
        "secret-in-env",
        "error",
        "A plain variable with a secret's name (`HF_TOKEN`, `…_API_KEY`) or a value that looks like one (`hf_…`, "
        "`sk-…`, `AKIA…`, a password in a URL).",
        "Whoever may read the job or the pod reads it.",
    ),
    Rule(
        "secret-in-command",
        "error",
        "A word of the command that is or holds a secret (`--token VALUE`).",
        "It is also in the process list of the node.",
    ),
    Rule(
        "secret-in-metadata",
        "error",
        "A label or annotation that holds one.",
        "Monitoring copies labels everywhere.",
    ),
    Rule(
        "secret-in-config",
        "error",
        "A value of the run's config that is or holds one.",
        "The config travels as a ConfigMap, which many may read.",
    ),
    Rule(
        "secret-in-index-url",
        "error",
        "`pip_index_url` with a user's name and password.",
        "It becomes a plain variable of the pod.",
    ),
    Rule(
        "unset-reference",
        "error",
        "`${VAR}` in the run's config that the pod does not have (a warning for Slurm, whose jobs inherit "
        "variables, and where it may be in `env_from_secrets`).",
        "The pod expands it, and exits with 2.",
    ),
)

_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1 is no secret
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_BY_RUNTIME = {"HOME", "HOSTNAME", "PATH"}  # every container has them
_TO_SECRET = "Put it into a Secret of the namespace, and name that: cluster.secret_env: {{{name}: SECRET/KEY}}."


def check_secrets(subject: Subject) -> Iterator[Finding]:
    yield from _check_variables(subject)
    yield from _check_commands(subject)
    yield from _check_metadata(subject)
    yield from _check_config(subject)
    url = subject.settings.pip_index_url
    if url and (hide_text(url) != url or re.match(r"\w+://[^/]*@", url)):
        fix = (
            "Remove the credentials; put the whole URL into a Secret: cluster.secret_env: {PIP_INDEX_URL: SECRET/KEY}."
        )
        yield error("secret-in-index-url", "cluster.pip_index_url", "it holds credentials", fix)
    yield from _check_references(subject)


def _holds_secret(name: str, value: str) -> bool:
    """Whether a plain value is one, by its name or by its look. `${HF_TOKEN}` names a variable and holds nothing."""
    if value.lower() in _SWITCHES or re.fullmatch(r"(\$\{\w+\}|\$\(\w+\))+", value):
        return False
    return is_secret(name) or hide_text(value) != value


def _check_variables(subject: Subject) -> Iterator[Finding]:
    for variable in subject.variables:
        if variable.value is not None and _holds_secret(variable.name, variable.value):
            what = f"{variable.name} is a secret in a plain variable"
            yield error("secret-in-env", variable.path, what, _TO_SECRET.format(name=variable.name))


def _check_commands(subject: Subject) -> Iterator[Finding]:
    # For what is ours, the settings; for what an overlay has put there, the rendered words.
    script = subject.job.script
    places = [("cluster.command", list(subject.job.command)) if script is None else ("script", script.words)]
    for path, container in subject.containers:
        for key in ("command", "args"):
            words = [str(word) for word in container.get(key) or ()]
            if words != container_command(subject.job):
                places.append((f"{path}.{key}", words))
    for where, words in places:
        for index, name in _secret_words(words):
            what = f"the word {index} holds a secret" + (f" ({name})" if name else "")
            fix = f"{_TO_SECRET.format(name='NAME')} The program reads it from the environment."
            yield error("secret-in-command", f"{where}[{index}]", what, fix)


def _secret_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """`--token=VALUE`, `--token VALUE`, and words that look like a secret: their index, and the option."""
    for index, word in enumerate(words):
        before = _OPTION.fullmatch(words[index - 1]) if index else None
        option = _OPTION.fullmatch(word)
        if option is not None:
            if option[2] and _holds_secret(option[1].replace("-", "_"), option[2]):
                yield index, f"--{option[1]}"
        elif before is not None and before[2] is None and _holds_secret(before[1].replace("-", "_"), word):
            yield index, f"--{before[1]}"
        elif _holds_secret("", word):
            yield index, ""


def _check_metadata(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    seen: set[tuple[str, str]] = set()
    places = [("cluster.annotations", settings.annotations), ("cluster.labels", settings.labels)]
    for pod in subject.pods:
        places += [(f"{pod.path}.metadata.{key}", pod.metadata.get(key) or {}) for key in ("annotations", "labels")]
    for where, pairs in places:
        for name, value in pairs.items():
            last = str(name).rpartition("/")[2]
            if (name, str(value)) not in seen and _holds_secret(last, str(value)):
                fix = "Remove it; annotations and labels are for everyone to read."
                yield error("secret-in-metadata", f"{where}.{name}", f"{name} holds a secret", fix)
            seen.add((str(name), str(value)))


def _check_config(subject: Subject) -> Iterator[Finding]:
    for path, leaf in subject.run_leaves:
        text = leaf.text if isinstance(leaf, Reference) else leaf
        name = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
        if isinstance(text, str) and text and _holds_secret(name, text):
            what = "it is a secret, or holds one, and the config travels as a ConfigMap"
            fix = "Write ${NAME} there, and take it from a Secret: cluster.secret_env: {NAME: SECRET/KEY}."
            yield error("secret-in-config", path, what, fix)


def _check_references(subject: Subject) -> Iterator[Finding]:
    given = {*subject.environment, *_BY_RUNTIME}
    for path, text in _references(subject.run_leaves):
        for name in dict.fromkeys(required_variables(text)):
            if name == "HOME":
                what = "${HOME} is the container's HOME, not yours"
                fix = "Write the path in the container, or ${NAME} with NAME in cluster.env."
                yield warning("unset-reference", path, what, fix)
            elif name not in given:
                yield _unset(subject, path, name)


def _unset(subject: Subject, path: str, name: str) -> Finding:
    fix = f"Set it in cluster.env or cluster.secret_env, or give a default: ${{{name}:-…}}."
    what = f"the pod has no variable {name}, which ${{{name}}} refers to"
    if subject.settings.env_from_secrets:
        secrets = ", ".join(subject.settings.env_from_secrets)
        return warning("unset-reference", path, f"{what}, unless it is a key of {secrets}", fix)
    report = warning if subject.target == "slurm" else error
    return report("unset-reference", path, what, fix)


def _references(leaves: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for path, leaf in leaves:
        if isinstance(leaf, Reference) and variables(leaf.text):
            yield path, leaf.text
