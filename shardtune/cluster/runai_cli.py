"""How is Run:ai's command `runai` called? With a list of arguments, and its own words when it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shardtune.errors import ShardtuneError, UserInputError

Workload = Literal["pytorch", "workload"]

_NOT_LOGGED_IN = re.compile(
    r"not logged in|not authenticated|log ?in (?:first|again|to)|please log ?in|runai login|unauthori[sz]ed|\b401\b|"
    r"token (?:is |has )?(?:expired|invalid)|(?:expired|invalid) (?:access |refresh )?token|session (?:has )?expired",
    re.IGNORECASE,
)
_UNKNOWN_FLAG = re.compile(r"unknown (?:shorthand )?flag: (\S+)", re.IGNORECASE)
_UNKNOWN_COMMAND = re.compile(r"unknown command", re.IGNORECASE)
_EXISTS = re.compile(r"already exists|name .{0,80}(?:is )?(?:taken|in use)|\b409\b", re.IGNORECASE)
_SHOWN_WORDS = 5  # of a command in a message: what follows may hold the environment


class RunaiCli:
    """The command `runai` for one project.

    Args:
        workload: `pytorch` for jobs that `runai training pytorch submit` made, `workload` for those from manifests.
        environ: Environment in which the command is looked for and run.

    Raises:
        UserInputError: there is no such command, or its user is not logged in.
        ShardtuneError: it failed; its words are in the message.
    """

    def __init__(self, project: str, workload: Workload = "pytorch", environ: Mapping[str, str] | None = None) -> None:
        self.project = project
        self._noun = ("training", "pytorch") if workload == "pytorch" else ("workload",)
        self._workload = workload
        self._environ = dict(os.environ if environ is None else environ)

    def submit(self, argv: Sequence[str]) -> str:
        """Run the arguments of `runai_argv`."""
        assert argv[0] == "runai", argv[0]
        return self._run(*argv[1:])

    def submit_manifest(self, file: Path, name: str) -> str:
        """Hand over one workload of a YAML file (Run:ai 2.23 and later); support objects are not taken."""
        return self._run("workload", "submit", name, "--file", str(file), "--project", self.project)

    def workloads(self) -> Any:
        """All workloads of the project, as the command's JSON."""
        return self._json(*self._noun, "list", "--project", self.project, "--json")

    def describe(self, name: str) -> Any:
        return self._json(*self._noun, "describe", name, "--project", self.project, "--output", "json")

    def logs(self, name: str, *, pod: str | None = None, tail: int | None = None) -> str:
        return self._run(*self._logs_words(name, pod, tail))

    def follow_logs(self, name: str, *, pod: str | None = None, tail: int | None = None) -> Iterator[str]:
        """Lines of a pod's log (the master's unless `pod` names another) as they come; ends with the command."""
        words = [*self._logs_words(name, pod, tail), "--follow"]
        command = [self._executable(), *words]
        # A file, because a full pipe that nobody reads would stop the command.
        with tempfile.TemporaryFile("w+", errors="replace") as complaints, subprocess.Popen(
            command, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True,
            errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                yield from (line.rstrip("\n") for line in process.stdout)
            except GeneratorExit:
                process.terminate()
                raise
            if process.wait() != 0:
                complaints.seek(0)
                raise _failure(words, process.returncode, complaints.read())

    def delete(self, name: str) -> str:
        return self._run(*self._noun, "delete", name, "--project", self.project)

    def suspend(self, name: str) -> str:
        return self._run(*self._suspendable(), "suspend", name, "--project", self.project)

    def resume(self, name: str) -> str:
        return self._run(*self._suspendable(), "resume", name, "--project", self.project)

    def whoami(self) -> str:
        """The user who is logged in."""
        return self._run("whoami")

    def _suspendable(self) -> tuple[str, ...]:
        if self._workload != "pytorch":
            raise UserInputError(
                "Run:ai cannot suspend a workload that came as a manifest.",
                why="Its documentation: stop and run are actions of its own training kinds only.",
                fix="Suspend it through Kubernetes (--to with the kind of the manifest), or cancel it: the run resumes "
                "from its checkpoint when it is submitted again.",
            )
        return self._noun

    def _logs_words(self, name: str, pod: str | None, tail: int | None) -> list[str]:
        words = [*self._noun, "logs", name, "--project", self.project]
        words += ["--pod", pod] if pod else []
        return words + (["--tail", str(tail)] if tail is not None else [])

    def _executable(self) -> str:
        found = shutil.which("runai", path=self._environ.get("PATH"))
        if found is None:
            raise UserInputError(
                "There is no command `runai` on PATH.",
                why="Jobs for Run:ai are sent with its command unless cluster.runai_submit is manifest. (The Python "
                "package called runai is something else.)",
                fix="Install it from your site's Run:ai page (help menu: Researcher Command Line Interface), then run "
                "`runai login`. Or set cluster.runai_submit: manifest.",
            )
        return found

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [self._executable(), *words], env=self._environ, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise _failure(words, done.returncode, f"{done.stdout}{done.stderr}")
        return done.stdout

    def _json(self, *words: str) -> Any:
        said = self._run(*words)
        try:
            return json.loads(said)
        except ValueError:
            raise ShardtuneError(
                f"`{_shown(words)}` printed no JSON.",
                why=said.strip()[:500] or "It printed nothing.",
                fix="Check which command `runai` is: `runai version`.",
            ) from None


def _shown(words: Sequence[str]) -> str:
    rest = " …" if len(words) > _SHOWN_WORDS else ""
    return " ".join(("runai", *words[:_SHOWN_WORDS])) + rest


def _failure(words: Sequence[str], code: int, said: str) -> ShardtuneError:
    """The error for what the command said, in its own words."""
    said = said.strip() or f"It said nothing (exit code {code})."
    if flag := _UNKNOWN_FLAG.search(said):
        return UserInputError(
            f"`{_shown(words)}`: this release of `runai` has no flag {flag[1]}.",
            why=said,
            fix="cluster.runai_submit: cli-2.20 is for release 2.20, cli for later ones (`runai version`); manifest "
            "needs no flags.",
        )
    if _NOT_LOGGED_IN.search(said):
        return UserInputError(
            "`runai` is not logged in, or its login has expired.",
            why=said,
            fix="Run `runai login` (without a browser: `runai login remote-browser`), then try again.",
        )
    if _UNKNOWN_COMMAND.search(said):
        return UserInputError(
            f"`{_shown(words)}`: this release of `runai` has no such command.",
            why=said,
            fix="Update it from your site's Run:ai page, or use Kubernetes: cluster.runai_submit: manifest.",
        )
    if _EXISTS.search(said):
        return UserInputError(
            "Run:ai already has a workload of that name.",
            why=said,
            fix="Set another cluster.job_name (or --name), or delete the old workload: files of its run are kept.",
        )
    return ShardtuneError(f"`{_shown(words)}` failed with exit code {code}.", why=said)
