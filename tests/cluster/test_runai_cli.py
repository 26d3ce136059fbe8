"""The command `runai`, played by a script that records its arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from described_jobs import executable, job_with

from shardtune.cluster.render_runai import runai_argv
from shardtune.cluster.runai_cli import RunaiCli, Workload
from shardtune.errors import ShardtuneError, UserInputError


class FakeRunai:
    """A `runai` on a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)}

    def says(self, out: str = "", error: str = "", code: int = 0) -> FakeRunai:
        record = self.folder / "argv.json"
        (self.folder / "out").write_text(out, encoding="utf-8")
        (self.folder / "error").write_text(error, encoding="utf-8")
        text = (
            "#!/usr/bin/env python3\nimport json, pathlib, sys\n"
            f"pathlib.Path({str(record)!r}).write_text(json.dumps(sys.argv[1:]))\n"
            f"sys.stdout.write(pathlib.Path({str(self.folder / 'out')!r}).read_text())\n"
            f"sys.stderr.write(pathlib.Path({str(self.folder / 'error')!r}).read_text())\n"
            f"sys.exit({code})\n"
        )
        executable(self.folder / "bin" / "runai", text)
        return self

    def cli(self, workload: Workload = "pytorch") -> RunaiCli:
        return RunaiCli("ml", workload, self.environ)

    @property
    def argv(self) -> list[str]:
        found: list[str] = json.loads((self.folder / "argv.json").read_text(encoding="utf-8"))
        return found


@pytest.fixture
def runai(tmp_path: Path) -> FakeRunai:
    return FakeRunai(tmp_path)


def test_a_rendered_command_arrives_word_for_word(runai: FakeRunai, tmp_path: Path) -> None:
    job = job_with(tmp_path, runai_project="ml", image="i", env={"A": "x $(touch /tmp/no) 'y' \n z"})
    argv = runai_argv(job, "cli")
    assert runai.says("Creating workload ft...\n").cli().submit(argv) == "Creating workload ft...\n"
    assert runai.argv == argv[1:]


def test_a_manifest_is_handed_over_as_a_file(runai: FakeRunai, tmp_path: Path) -> None:
    runai.says().cli("workload").submit_manifest(tmp_path / "x.yaml", "ft")
    assert runai.argv == ["workload", "submit", "ft", "--file", str(tmp_path / "x.yaml"), "--project", "ml"]


def test_lists_and_descriptions_are_json(runai: FakeRunai) -> None:
    assert runai.says('[{"name": "ft"}]').cli().workloads() == [{"name": "ft"}]
    assert runai.argv == ["training", "pytorch", "list", "--project", "ml", "--json"]
    assert runai.says('{"phase": "Running"}').cli("workload").describe("ft") == {"phase": "Running"}
    assert runai.argv == ["workload", "describe", "ft", "--project", "ml", "--output", "json"]


def test_words_where_json_was_asked_for_are_shown(runai: FakeRunai) -> None:
    with pytest.raises(ShardtuneError, match="no JSON") as failed:
        runai.says("A new version is available").cli().workloads()
    assert "A new version is available" in failed.value.why


@pytest.mark.parametrize("verb", ["delete", "suspend", "resume"])
def test_jobs_are_deleted_suspended_and_resumed_by_name(runai: FakeRunai, verb: str) -> None:
    getattr(runai.says().cli(), verb)("ft")
    assert runai.argv == ["training", "pytorch", verb, "ft", "--project", "ml"]


def test_a_workload_from_a_manifest_cannot_be_suspended(runai: FakeRunai) -> None:
    with pytest.raises(UserInputError, match="cannot suspend"):
        runai.says().cli("workload").suspend("ft")


def test_logs_can_be_read_and_followed(runai: FakeRunai) -> None:
    assert runai.says("a\nb\n").cli().logs("ft", pod="ft-worker-0", tail=5) == "a\nb\n"
    assert runai.argv == ["training", "pytorch", "logs", "ft", "--project", "ml", "--pod", "ft-worker-0", "--tail", "5"]
    assert list(runai.says("a\nb\n").cli().follow_logs("ft")) == ["a", "b"]
    assert runai.argv[-1] == "--follow"


def test_a_follower_that_fails_says_why(runai: FakeRunai) -> None:
    with pytest.raises(ShardtuneError, match="failed with exit code 1") as failed:
        list(runai.says("a\n", "pod not found", 1).cli().follow_logs("ft"))
    assert failed.value.why == "pod not found"


def test_a_missing_command_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no command `runai`") as missing:
        RunaiCli("ml", environ={"PATH": str(tmp_path)}).workloads()
    assert "runai login" in missing.value.fix and "runai_submit: manifest" in missing.value.fix


@pytest.mark.parametrize(
    "words",
    [
        "Error: you are not logged in, please run 'runai login'",
        "failed to authenticate: token expired",
        "Error: 401 Unauthorized",
        "Session has expired. Please log in again",
    ],
)
def test_a_user_who_is_not_logged_in_reads_the_commands_words_and_what_to_run(runai: FakeRunai, words: str) -> None:
    with pytest.raises(UserInputError, match="not logged in") as failed:
        runai.says(error=words, code=1).cli().workloads()
    assert failed.value.why == words
    assert "runai login" in failed.value.fix


def test_a_flag_of_another_release_is_named(runai: FakeRunai) -> None:
    said = "Error: unknown flag: --termination-grace-period\nUsage: …"
    with pytest.raises(UserInputError, match="has no flag --termination-grace-period") as failed:
        runai.says(error=said, code=1).cli().submit(["runai", "training", "pytorch", "submit", "ft"])
    assert "cli-2.20" in failed.value.fix


def test_a_command_that_this_release_does_not_have_is_named(runai: FakeRunai) -> None:
    with pytest.raises(UserInputError, match="has no such command"):
        runai.says(error='unknown command "submit" for "runai workload"', code=1).cli().workloads()


def test_a_taken_name_is_recognised(runai: FakeRunai) -> None:
    with pytest.raises(UserInputError, match="already has a workload"):
        runai.says(error="workload ft already exists in project ml", code=1).cli().workloads()


def test_a_failure_shows_its_words_and_not_the_environment(runai: FakeRunai) -> None:
    argv = ["runai", "training", "pytorch", "submit", "ft", "-e", "TOKEN=hidden"]
    with pytest.raises(ShardtuneError, match="failed with exit code 3") as failed:
        runai.says(error="quota exceeded", code=3).cli().submit(argv)
    assert failed.value.why == "quota exceeded"
    assert "hidden" not in str(failed.value)


def test_a_silent_failure_still_says_its_exit_code(runai: FakeRunai) -> None:
    with pytest.raises(ShardtuneError) as failed:
        runai.says(code=9).cli().whoami()
    assert "exit code 9" in failed.value.why
