"""What does the container of today's job run? Packages it installs become the image, its launcher becomes ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.cluster.import_report import Imported
from shardtune.cluster.import_values import import_variable

ReadScript = Callable[[str], str | None]

_SHELLS = ("bash", "sh", "zsh", "dash")
_PREFIXES = ("exec", "time", "nohup", "command", "sudo", "stdbuf", "numactl")
_HOUSEKEEPING = (
    "set", "cd", "echo", "printf", "mkdir", "source", ".", "ulimit", "umask", "trap", "true", "test", "[", "nvidia-smi",
    "date", "hostname", "env", "ls", "cat", "sleep", "wait", "pwd", "if", "then", "else", "fi", "do", "done", "for",
    "unset", "shift", "local", "exit", "ibstat", "df", "free",
)  # fmt: skip
_FROM_TRL = "docs/from-trl.md shows what each of its lines becomes"
_DEEPEST = 3  # scripts that call scripts


@dataclass
class _Findings:
    packages: list[str] = field(default_factory=list)
    launcher: str = ""
    script: str = ""
    config_file: str = ""
    processes: str = ""
    is_ours: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def import_command(found: Imported, key: str, words: Sequence[str], read_script: ReadScript) -> None:
    """Judge the command of a container. The section gets none: `shardtune train` is the default.

    Args:
        read_script: The text of a script that the command names, or None if it is not at hand.
    """
    findings = _Findings()
    try:
        _read_words(list(words), findings, read_script, 0)
    except ValueError as error:
        found.add(key, words[0], "not supported", f"It cannot be read as shell: {error}.")
        return
    # Not the whole command, in which a token may stand anywhere.
    shown = " ".join(words[:2]) + (" …" if len(words) > 2 else "")
    _report_launcher(found, key, shown, findings)
    if findings.packages:
        listed = ", ".join(dict.fromkeys(findings.packages))
        why = "Installed again at every start, on every node: build them into cluster.image (docs/cluster.md)."
        found.add("pip install", listed, "changed", f"Left out. {why}")
    for name, value in findings.variables.items():
        import_variable(found, "export", name, value)
    for name in findings.unread:
        why = "The script is not here, so what it runs is not known. Name it: --script FILE."
        found.add("script", name, "not supported", why)
    if findings.other:
        why = "Left out: commands besides the training. Put them into the image, or write cluster.command."
        found.add("also runs", ", ".join(dict.fromkeys(findings.other)), "not supported", why)


def _report_launcher(found: Imported, key: str, shown: str, findings: _Findings) -> None:
    if findings.is_ours:
        found.add(key, shown, "no effect", "Already the default command.")
    elif findings.launcher:
        parts = [f"`{findings.launcher}`" + (f" with {findings.script}" if findings.script else "")]
        if findings.config_file:
            parts.append(f"parallel.accelerate_config: {findings.config_file} reads the accelerate file as it is")
        if findings.processes:
            parts.append("one process is started per GPU")
        why = f"{'; '.join(parts)}. The script's settings go into run.yaml: {_FROM_TRL}."
        found.add(key, shown, "translated", why, "no command: shardtune train run.yaml")
    elif not findings.unread:
        why = f"No training launcher was found in it. shardtune train runs instead ({_FROM_TRL})."
        found.add(key, shown, "not supported", why)
    else:
        found.add(key, shown, "translated", "Replaced as a whole.", "no command: shardtune train run.yaml")


def local_script(explicit: Path | None) -> ReadScript:
    """Reads the file that --script names for the first script, and others where they exist here."""
    pending = [explicit] if explicit is not None else []

    def read(name: str) -> str | None:
        file = pending.pop() if pending else Path(name)
        try:
            return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
        except OSError:
            return None

    return read


# --- reading --------------------------------------------------------------------------------------------------------


def _read_words(words: list[str], findings: _Findings, read_script: ReadScript, depth: int) -> None:
    words = _without_prefixes(words, findings)
    if not words:
        return
    program = Path(words[0]).name
    if program in _SHELLS:
        _read_shell(words, findings, read_script, depth)
    elif program.endswith(".sh"):
        _read_script_file(words[0], findings, read_script, depth)
    elif program == "export":
        findings.variables.update(_assignments(words[1:]))
    elif not _is_install(words, findings) and not _is_launcher(words, findings) and program not in _HOUSEKEEPING:
        findings.other.append(program)


def _read_shell(words: list[str], findings: _Findings, read_script: ReadScript, depth: int) -> None:
    for position, word in enumerate(words[1:], 1):
        if re.fullmatch(r"-[a-z]*c", word):
            for statement in _statements(words[position + 1] if position + 1 < len(words) else ""):
                _read_words(statement, findings, read_script, depth)
            return
        if not word.startswith("-"):
            _read_script_file(word, findings, read_script, depth)
            return


def _read_script_file(name: str, findings: _Findings, read_script: ReadScript, depth: int) -> None:
    text = read_script(name) if depth < _DEEPEST else None
    if text is None:
        findings.unread.append(name)
        return
    for statement in _statements(text):
        _read_words(statement, findings, read_script, depth + 1)


def _statements(text: str) -> list[list[str]]:
    """Commands of a shell text, as lists of words. Quotes, comments and continued lines are the shell's; expansions
    stay as they are written."""
    text = _without_comments(re.sub(r"\\\n", " ", text))
    text = re.sub(r"<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$", "", text, flags=re.DOTALL | re.MULTILINE)  # here-documents
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n()")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|\n()"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def _without_comments(text: str) -> str:
    """shlex's own treatment of comments swallows the end of the line, and with it the end of the command."""
    quoted = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
    return re.sub(
        rf"({quoted})|(?:(?<=\s)|^)#[^\n]*", lambda match: match[1] or "", text, flags=re.DOTALL | re.MULTILINE
    )


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """`A=b` words. `${A:-b}` stands for b: the value where nothing else sets it."""
    pairs = (word.partition("=") for word in words if re.match(r"[A-Za-z_]\w*=", word))
    return {name: re.sub(r"^\$\{\w+:?-([^}]*)\}$", r"\1", value) for name, _, value in pairs}


def _without_prefixes(words: list[str], findings: _Findings) -> list[str]:
    """Without `A=b`, `exec` and the like before the program."""
    while words:
        if re.match(r"[A-Za-z_]\w*=", words[0]):
            assigned = _assignments(words[:1])
            if len(words) > 1:  # for this command; alone it is a variable of the script
                findings.variables.update(assigned)
        elif words[0] not in _PREFIXES and not (words[0] == "env" and len(words) > 1):
            break
        words = words[1:]
    return words


def _is_install(words: list[str], findings: _Findings) -> bool:
    joined = " ".join(words)
    match = re.match(
        r"(?:\S*python[\d.]* -m |\S*uv )?\S*(pip[\d.]*|conda|mamba|apt-get|apt|dnf|yum)\b.*? install\b", joined
    )
    match = match or re.match(r"\S*(apt-get|apt|dnf|yum|pip[\d.]*) (?:update|upgrade)\b", joined)
    if match is None:
        return False
    rest = words[words.index("install") + 1 :] if "install" in words else []
    skip = False
    for word in rest:
        if skip or word.startswith("-"):
            skip = not skip and word in (
                "-i",
                "-r",
                "-c",
                "-f",
                "--index-url",
                "--extra-index-url",
                "--find-links",
                "-t",
            )
            if word in ("-r", "--requirement"):
                findings.packages.append("a requirements file")
            continue
        if not word.startswith((">", "2>")):
            findings.packages.append(word)
    return True


def _is_launcher(words: list[str], findings: _Findings) -> bool:
    program = Path(words[0]).name
    arguments = words[1:]
    if program == "shardtune" or (program.startswith("python") and arguments[:2] == ["-m", "shardtune"]):
        findings.is_ours = True
        return True
    if program == "accelerate" and arguments[:1] == ["launch"]:
        findings.launcher, arguments = "accelerate launch", arguments[1:]
    elif program in ("torchrun", "deepspeed"):
        findings.launcher = program
    elif program.startswith("python") and arguments[:1] == ["-m"] and len(arguments) > 1:
        if not arguments[1].startswith(("torch.distributed", "accelerate", "deepspeed")):
            return False
        findings.launcher, arguments = f"python -m {arguments[1]}", arguments[2:]
    elif program.startswith("python") and any(word.endswith(".py") for word in arguments):
        findings.launcher = "python"
    else:
        return False
    findings.script = next((word for word in arguments if word.endswith(".py")), "")
    ours = arguments[: arguments.index(findings.script)] if findings.script else arguments
    findings.config_file = _option(ours, "--config_file", "--config-file")
    findings.processes = _option(ours, "--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
    if "-m" in ours and ours[ours.index("-m") + 1 : ours.index("-m") + 2] == ["shardtune"]:
        findings.is_ours = True
    return True


def _option(words: Sequence[str], *names: str) -> str:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[position + 1 :]), "")
    return ""
