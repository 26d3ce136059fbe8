"""A chat can be found by its run while it is served, by its own user alone, and the dashboard links to what it can reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import FakeRun

from shardtune.inference.source import FINAL as PUBLISHED
from shardtune.report import header
from shardtune.report.api import RunsApi
from shardtune.report.chat_servers import ChatServer, chat_server, recorded, records_folder
from shardtune.run.evaluation import ADAPTER_WEIGHTS
from shardtune.run.folder import CHECKPOINTS

LOCAL = ChatServer("http://127.0.0.1:8766/", needs_token=False)


@pytest.fixture(autouse=True)
def no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_it_is_found_by_its_run_as_long_as_it_is_served(tmp_path: Path) -> None:
    with recorded(tmp_path, LOCAL) as first:
        assert first and chat_server(tmp_path) == LOCAL and chat_server(tmp_path / "other") is None
        with recorded(tmp_path, ChatServer("http://127.0.0.1:1/", needs_token=False)) as second:
            assert not second and chat_server(tmp_path) == LOCAL, "the first of two counts"
        assert chat_server(tmp_path) == LOCAL
    assert chat_server(tmp_path) is None and list(records_folder().iterdir()) == []


def test_the_record_of_a_process_that_was_killed_means_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from shardtune.report.chat_servers import ChatServer, recorded\n"
        "with recorded(Path(sys.argv[1]), ChatServer('http://127.0.0.1:1/', False)):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list(records_folder().iterdir())) == 2 and chat_server(tmp_path) is None
    with recorded(tmp_path, LOCAL) as taken_over:
        assert taken_over and chat_server(tmp_path) == LOCAL


def test_a_folder_in_which_others_may_write_is_not_believed(tmp_path: Path) -> None:
    with recorded(tmp_path, LOCAL):
        records_folder().chmod(0o777)
        assert chat_server(tmp_path) is None
        with recorded(tmp_path / "another", LOCAL) as is_recorded:
            assert not is_recorded
        records_folder().chmod(0o700)


def ended(folder: Path) -> FakeRun:
    run = FakeRun(folder, ranks=1)
    run.begin(5)
    run.step(5, 5)
    run.end(5)
    return run


@pytest.mark.parametrize(
    ("server", "local", "link"),
    [(LOCAL, True, True), (LOCAL, False, False), (ChatServer("http://node:8766/", needs_token=True), True, False)],
)
def test_the_dashboard_links_only_to_what_its_reader_can_open(
    server: ChatServer, local: bool, link: bool, tmp_path: Path
) -> None:
    run = ended(tmp_path / "one")
    api = RunsApi(tmp_path, local=local)
    before = api.run("one", None)
    assert before is not None and before["chat"] is None
    with recorded(run.folder, server):
        view = api.run("one", before["cursor"])
        assert view is not None and "unchanged" not in view
        assert ("address" in view["chat"]) == link and view["chat"]["text"]
    after = api.run("one", view["cursor"])
    assert after is not None and after["chat"] is None


def test_the_command_is_named_where_there_is_a_model_to_ask(tmp_path: Path) -> None:
    run = ended(tmp_path / "one")
    folder = run.folder
    found = RunsApi(tmp_path).run("one", None)
    assert found is not None and found["ask"] == ""
    run.checkpoint(5, None)
    found = RunsApi(tmp_path).run("one", None)
    assert found is not None and found["ask"] == f"shardtune chat {folder} --checkpoint latest --web"
    (folder / "final").mkdir()
    (folder / "final" / ADAPTER_WEIGHTS).write_bytes(b"")
    found = RunsApi(tmp_path).run("one", None)
    assert found is not None and found["ask"] == f"shardtune chat {folder} --web"


def test_the_names_of_files_are_those_that_runs_write() -> None:
    assert (header.FINAL, header.CHECKPOINTS, header.ADAPTER_WEIGHTS) == (PUBLISHED, CHECKPOINTS, ADAPTER_WEIGHTS)
