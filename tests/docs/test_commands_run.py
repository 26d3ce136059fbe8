"""Every command that a page shows, typed: it must do what it is there for. reader.py says what is changed, not_run.py what is left out."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from api_server import ApiServer
from cluster_objects import pod, workload
from not_run import reason
from reader import JOB, NESTED_RUN, OF_CLUSTERS, OTHER_RUN, RUN, make_folder, profiles, words_to_type
from shown_commands import ShownCommand, shown_commands

RUN_IDS = (RUN, OTHER_RUN, NESTED_RUN)
# Those that answer in a moment run in this process, where everything is imported already.
QUICK = ("config", "plan", "explain", "init", "env", *OF_CLUSTERS)
# So do these, once there is a run.
ABOUT_RUNS = ("best", "checkpoints", "eval", "export", "generate", "report")
# What is found on a machine without GPUs, or of a plan that does not fit, is not what the command is tested for.
MAY_FAIL = {"doctor": (0, 1), "plan": (0, 1)}
FIRST_PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/own-data.md", "docs/what-fits.md")
SECRET = "a-secret-of-sixteen-characters-and-more"


def commands() -> list[ShownCommand]:
    """Each that is typed in the same way once; the nodes of a run are started together, whichever of them a page shows."""
    found: dict[str, ShownCommand] = {}
    for command in shown_commands():
        if reason(command.text) is None:
            started = command.words[: command.words.index("shardtune")]
            words = [*started, *words_to_type(command)]
            key = " ".join(word for i, word in enumerate(words) if not is_of_node(words, i))
            found.setdefault(key, command)
    return list(found.values())


def is_of_node(words: list[str], index: int) -> bool:
    """An option that says which node this is, or its value."""
    options = ("--node-rank", "--master-addr", "--master-port")
    return words[index] in options or words[index - 1] in options


def is_quick(command: ShownCommand) -> bool:
    words = words_to_type(command) if "shardtune" in command.words else []
    return command.words[0] == "shardtune" and words[0] in QUICK and not any(run in command.text for run in RUN_IDS)


def is_about_a_run(command: ShownCommand) -> bool:
    words = command.words
    return words[0] == "shardtune" and words[1] in ABOUT_RUNS and not is_quick(command)


ALL = commands()


def quick_ones() -> list[ParameterSet]:
    """Those of the first pages run with every change, the others with the slow tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(command, id=command.place, marks=() if command.page in FIRST_PAGES else slow)
        for command in ALL
        if is_quick(command)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def with_runs(folder: Path, shared_environment: dict[str, str]) -> Path:
    """The same with the runs that pages name: one that was trained, under each of their ids."""
    here = folder / "here"
    trained = [sys.executable, "-m", "shardtune", "train", "run.yaml", "--run-id", RUN, "-o", "parallel.device=cpu"]
    subprocess.run(trained, cwd=here, env=shared_environment, check=True, capture_output=True, timeout=200)
    for name in (OTHER_RUN, NESTED_RUN):
        shutil.copytree(here / "runs" / RUN, here / "runs" / name)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    """A cluster on which the job that pages call NAME has ended, or is suspended where a page resumes it."""
    root = tmp_path / "container"
    (root / "runs" / JOB / "final").mkdir(parents=True)
    (root / "runs" / JOB / "run.json").write_text("{}", encoding="utf-8")
    with ApiServer(root) as running:
        running.namespaces |= {"runai-language"}
        yield running


def put_job(server: ApiServer, word: str) -> None:
    ended = word in ("logs", "status", "describe")
    server.put("jobs", workload("Job", *([("Complete", "done")] if ended else []), suspend=word == "resume"))
    if word not in ("resume", "cancel"):  # where it would wait for a controller to end the pods
        made = server.put("pods", pod(0, "Succeeded" if ended else "Running", exit_code=0 if ended else None))
        log = server.log(made["metadata"]["name"])
        log.add("step 1/2")
        log.ended = True


@pytest.mark.parametrize("command", quick_ones())
def test_a_quick_command_of_a_page_works(
    command: ShownCommand, folder: Path, tmp_path: Path, home: Path, server: ApiServer,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = words_to_type(command)
    there = tmp_path / "there"
    shutil.copytree(folder / ("cluster" if words[0] in OF_CLUSTERS else "here"), there, symlinks=True)
    (home / ".config" / "shardtune").mkdir(parents=True)
    (home / ".config" / "shardtune" / "clusters.yaml").write_text(profiles(), encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(there)
    if words[0] in OF_CLUSTERS and words[0] not in ("cluster", "submit"):
        put_job(server, words[0])
    if words[0] == "init":
        (there / "run.yaml").unlink()  # it replaces none
    type_here(words, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in ALL if is_about_a_run(c)], ids=lambda command: command.place)
def test_a_command_of_a_page_about_a_run_works(
    command: ShownCommand, with_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    there = tmp_path / "here"
    shutil.copytree(with_runs / "here", there)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(there)
    type_here(words_to_type(command), monkeypatch, capsys)


def type_here(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line in this process."""
    from shardtune.cli.main import main

    monkeypatch.setattr("sys.argv", ["shardtune", *words])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert int(str(code or 0)) in MAY_FAIL.get(words[0], (0,)), f"{words}\n{out}\n{err}"
    assert out or err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in ALL if not is_quick(c) and not is_about_a_run(c)], ids=lambda command: command.place
)
def test_a_command_of_a_page_works(
    command: ShownCommand, with_runs: Path, shared_environment: dict[str, str], tmp_path: Path
) -> None:
    words = words_to_type(command)
    there = tmp_path / "here"
    shutil.copytree(with_runs / "here", there)
    if words[0] == "train":
        for name in RUN_IDS:  # or the command would be about resuming one
            shutil.rmtree(there / "runs" / name)
    python = [sys.executable, "-m", "shardtune", *words]
    environment = {**shared_environment, "SHARDTUNE_SECRET": SECRET, "COLUMNS": "120"}
    if command.words[0] != "shardtune":
        python = [*started_by(command.words), *words]
    if words[0] == "dashboard" or "--web" in words:
        serve(python, there, environment)
    elif "--nnodes" in words:
        start_nodes(python, there, environment)
    else:
        done = subprocess.run(
            python, cwd=there, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        assert done.returncode in MAY_FAIL.get(words[0], (0,)), f"{words}\n{done.stdout}\n{done.stderr}"


def started_by(words: list[str]) -> list[str]:
    """`torchrun … -m shardtune`, with two processes."""
    launcher = words[: words.index("shardtune") + 1]
    if "--nproc-per-node" in launcher:
        launcher[launcher.index("--nproc-per-node") + 1] = "2"
    return [str(Path(sys.executable).parent / launcher[0]), *launcher[1:]]


def start_nodes(python: list[str], there: Path, environment: dict[str, str]) -> None:
    """As many nodes as the command says, on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = int(python[python.index("--nnodes") + 1])
    place = python.index("--nnodes")
    kept = [word for i, word in enumerate(python) if not is_of_node(python, i)]
    where = ["--master-addr", "127.0.0.1", "--master-port", port]
    started = [
        subprocess.Popen(
            [*kept[:place], "--node-rank", str(rank), *where, *kept[place:]], cwd=there, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )
        for rank in range(nodes)
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=300)[0] for node in started]
    finally:
        for node in started:
            if node.poll() is None:
                node.kill()
    allowed = MAY_FAIL["doctor"] if "doctor" in python else (0,)
    assert {node.returncode for node in started} <= set(allowed), "\n".join(outputs)


def serve(python: list[str], there: Path, environment: dict[str, str]) -> None:
    """A page that is served until Ctrl-C: it answers with an address, and ends when it is asked to."""
    server = subprocess.Popen(
        python, cwd=there, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        seen = wait_for(lambda: server.stdout.readline(), "http://")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130), seen
    finally:
        server.kill()
        server.communicate()


def wait_for(read: Callable[[], str], text: str) -> str:
    seen, end = "", time.monotonic() + 60
    while text not in seen and time.monotonic() < end:
        line = read()
        assert line, f"ended without {text}: {seen}"
        seen += line
    return seen
