"""`shardtune run` as a user calls it: exit codes, logs, the first error, signals, deadlines, names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import free_ports
from running import Command, events

from shardtune.observe.schema import problems

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A script of the user's; ranks start faster without torch, which most of these do not need."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(shardtune: Command, tmp_path: Path) -> Command:
    def run(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
        return shardtune("run", "--skip-preflight", "-o", f"train.output_dir={tmp_path / 'runs'}", *words, **more)

    return run


def all_events(folder: Path) -> list[dict]:
    return [json.loads(line) for log in folder.glob("events-rank*.jsonl") for line in log.read_text().splitlines()]


UNCHANGED = """
    import os, sys
    print("arguments", sys.argv[1:], __name__, __file__)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], file=sys.stderr)
"""


def test_an_unchanged_script_gets_its_arguments_and_leaves_logs_times_and_samples(
    run: Command, write: Write, tmp_path: Path
) -> None:
    script = write(UNCHANGED)
    done = run("--nproc", 2, "--name", "one", "--", script, "--lr", "0.1", "a b", "--", "-x", "$HOME")
    assert done.returncode == 0, done.stderr
    assert f"arguments ['--lr', '0.1', 'a b', '--', '-x', '$HOME'] __main__ {script}" in done.stdout
    folder = tmp_path / "runs" / "one"
    for rank in range(2):
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2" in log and "arguments" in log
        kinds = [
            event["event"] for event in map(json.loads, (folder / f"events-rank{rank}.jsonl").read_text().splitlines())
        ]
        assert kinds[0] == "run_start" and kinds[-2:] == ["usage", "run_end"]
        assert events(folder, "usage", rank)[-1]["host"]["rss"] > 1 << 20
    assert not [problem for event in all_events(folder) for problem in problems(event)]
    start = events(folder, "run_start")[0]
    assert start["script"] == "script.py" and start["world_size"] == 2 and start["command"].startswith("shardtune run ")
    record = json.loads((folder / "run.json").read_text())
    assert record["kind"] == "script" and record["finished"] and record["exit_code"] == 0
    assert "rank 1" not in done.stderr, "only the first rank is shown"


def test_all_ranks_are_shown_with_their_number_when_asked_for(run: Command, write: Write) -> None:
    done = run("--nproc", 2, "--show-all-ranks", "--", write(UNCHANGED))
    assert {"[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"} <= set(done.stderr.splitlines())


def test_a_module_runs_as_python_would_run_it(run: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("import sys\nprint('module', __name__, sys.argv[1:])\n")
    done = run("--", "-m", "package.inner", "x", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:."})
    assert "module __main__ ['x']" in done.stdout, done.stderr
    missing = run("--", "-m", "package.nowhere", env={"PYTHONPATH": f"{tmp_path}:."})
    assert missing.returncode == 1 and "No module named package.nowhere" in missing.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("sys.exit('out of luck')", 1, "script.py ended: out of luck"),
        ("import os; os._exit(9)", 9, "ended with exit code 9"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2, "script.py ended with exit code 2"),
        ("import os; os.kill(os.getpid(), 11)", 139, "was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_exit_code_is_the_scripts_own(run: Command, write: Write, ending: str, code: int, said: str) -> None:
    done = run("--nproc", 1, "--", write(f"import sys\n{ending}"))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_one_rank_that_raises_stops_all_and_its_message_comes_first(run: Command, write: Write, tmp_path: Path) -> None:
    script = write("""
        import os, time
        def explode():
            raise ValueError("no such class: zebra")
        if os.environ["RANK"] == "1":
            explode()
        time.sleep(1000)
    """)
    began = time.monotonic()
    done = run("--nproc", 3, "--name", "x", "--force", "--", script, timeout=120)
    assert done.returncode == 1 and time.monotonic() - began < 100
    first = next(line for line in done.stderr.splitlines() if line.strip())
    assert first.startswith("Rank 1 failed first")
    assert "ValueError: no such class: zebra" in done.stderr
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert "shardtune" not in trace.split("ValueError")[0].replace(str(tmp_path), ""), "frames of the launcher"
    folder = tmp_path / "runs" / "x"
    assert "zebra" in (folder / "logs" / "rank-1.log").read_text()
    assert "zebra" in events(folder, "run_failed", 1)[0]["text"]
    assert json.loads((folder / "crash" / "findings.json").read_text())["findings"][0]["rank"] == 1


LIKE_PYTHON = """
    from dataclasses import dataclass, fields
    import atexit, gzip, os, pathlib, sys

    @dataclass
    class Config:
        epochs: int = 1

    here = pathlib.Path(__file__).parent
    os.chdir("/")
    print("types", [field.type for field in fields(Config)], "file", pathlib.Path(__file__).is_file(), __loader__.get_source("__main__")[:1])
    atexit.register(lambda: (here / "atexit").write_text("ran"))
    sys.excepthook = lambda kind, error, trace: print("my hook:", error)

    class Logger:
        def __init__(self):
            self.file = open(here / "metrics.csv", "w")
            self.itself = self  # collected by nobody

    import logging, logging.handlers
    memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(here / "log.txt"))
    logging.getLogger().addHandler(memory)
    logging.warning("kept until the end")
    logger, packed = Logger(), gzip.open(here / "packed.gz", "wt")
    logger.file.write("epoch,loss")
    packed.write("all of it")
    if len(sys.argv) > 1:
        exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('torn')", 1)], ids=["done", "exit", "error"]
)
def test_a_script_ends_as_in_python_with_its_files_written(
    run: Command, write: Write, tmp_path: Path, ending: str, code: int
) -> None:
    import gzip

    done = run("--", write(LIKE_PYTHON), *filter(None, [ending]))
    assert done.returncode == code, done.stderr
    assert "types [<class 'int'>] file True" in done.stdout
    assert (tmp_path / "metrics.csv").read_text() == "epoch,loss" and (tmp_path / "atexit").read_text() == "ran"
    assert (tmp_path / "log.txt").read_text() == "kept until the end\n"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"all of it"
    assert ("my hook: torn" in done.stdout) == (code == 1)


def test_a_rank_that_ends_early_is_named_and_not_the_network(run: Command, write: Write) -> None:
    script = write("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for _ in range(2 + 3 * (dist.get_rank() == 0)):
            dist.all_reduce(torch.ones(1))
    """)
    done = run("--nproc", 2, "--", script)
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stderr.split())
    assert "Rank 1 had ended with exit code 0 while other ranks waited for it." in said
    assert "DistributedSampler" in said and "Check the network" not in said


def test_wrong_arguments_do_not_use_up_the_name(run: Command, write: Write, tmp_path: Path) -> None:
    script = write("import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', type=float); p.parse_args()")
    wrong = run("--name", "n", "--", script, "--lr", "fast")
    assert wrong.returncode == 2 and f"{tmp_path / 'runs' / 'n' / 'logs' / 'rank-0.log'}" in wrong.stderr
    assert run("--name", "n", "--", script, "--lr", "0.1").returncode == 0


@pytest.mark.slow
def test_a_script_that_never_steps_is_ended_by_the_deadline(run: Command, write: Write, tmp_path: Path) -> None:
    busy = write("while True: sum(range(1000))")
    done = run("--nproc", 2, "--name", "n", "-o", "parallel.load_timeout_minutes=0.05", "--", busy, timeout=120)
    assert done.returncode == 76, done.stderr
    assert "hung while running the script, before its first step" in done.stderr
    assert "no step yet (parallel.load_timeout_minutes)" in " ".join(done.stderr.split())
    assert "script.py" in (tmp_path / "runs" / "n" / "crash" / "rank-0.txt").read_text()


def start(tmp_path: Path, environment: dict[str, str], *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardtune", "run", "--skip-preflight", "-o", f"train.output_dir={tmp_path / 'runs'}",
         *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(what: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_script_that_does_not_ask(
    tmp_path: Path, environment: dict[str, str], write: Write, number: signal.Signals, code: int
) -> None:
    script = write("import pathlib, time\npathlib.Path(__file__).with_name('here').touch()\ntime.sleep(1000)")
    process = start(tmp_path, environment, "--nproc", 1, "--", script)
    wait_for(lambda: (tmp_path / "here").exists())
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "observe.stop_requested()" in out and "Traceback" not in err


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, environment: dict[str, str], write: Write) -> None:
    script = write("""
        import os, pathlib, time
        pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
        time.sleep(1000)
    """)
    process = start(tmp_path, environment, "--", script)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    process.kill()
    process.communicate(timeout=30)
    pid = (tmp_path / "pid").read_text()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_the_same_name_is_for_the_same_command_until_it_is_done(run: Command, write: Write) -> None:
    script = write("""
        import pathlib, sys
        done = pathlib.Path(__file__).with_name("second")
        if not done.exists():
            done.touch()
            sys.exit(5)
    """)
    assert run("--name", "n", "--", script, "a").returncode == 5
    other = run("--name", "n", "--", script, "b")
    assert other.returncode == 2 and "has another command" in other.stderr
    again = run("--name", "n", "--", script, "a")
    assert again.returncode == 0 and "started again" in again.stdout
    finished = run("--name", "n", "--", script, "a")
    assert finished.returncode == 2 and "has finished" in finished.stderr


@pytest.mark.slow
def test_a_training_run_is_neither_written_into_nor_resumed_from(run: Command, write: Write, tmp_path: Path) -> None:
    from shardtune.run.which_run import read_run

    folder = tmp_path / "runs" / "taken"
    folder.mkdir(parents=True)
    (folder / "something").touch()
    refused = run("--name", "taken", "--", write("pass"))
    assert refused.returncode == 2 and "is not that of a script's run" in refused.stderr
    assert run("--name", "mine", "--", write("pass")).returncode == 0
    assert read_run(tmp_path / "runs" / "mine") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "No script was given."),
        (("--", "-m"), "-m names no module."),
        (("--", "torchrun", "train.py"), "'torchrun' is not a script."),
        (("--", "nowhere.py"), "There is no file 'nowhere.py'."),
        (("--", "."), "It is a folder."),
        (("--name", "../up", "--", "script.py"), "--name '../up' is not a valid folder name."),
        (("-o", "train.learning_rate=1", "--", "script.py"), "no effect on a script"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    run: Command, words: tuple[str, ...], said: str, write: Write
) -> None:
    words = tuple(str(write("pass")) if word == "script.py" else word for word in words)
    refused = run(*words)
    assert refused.returncode == 2 and said in " ".join(refused.stderr.split()), refused.stderr


def test_under_another_launcher_it_refuses_to_start_a_run_in_every_rank(run: Command, write: Write) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    refused = run("--", write("pass"), env=ranks)
    assert refused.returncode == 2 and "started by another launcher" in refused.stderr


GROUP = """
    import os, signal, torch, torch.distributed as dist
    from shardtune import observe
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = observe.load_checkpoint()
    print("world", int(total), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], "found", found and found[0])
    for _ in observe.steps(range(6 - (found[0] if found else 0))):
        dist.barrier()
        if observe.current_step() == 3:
            observe.save_checkpoint(lambda folder: (folder / "x").write_text("x"))
        dist.barrier()
        if observe.current_step() == 4 and dist.get_rank() == 1 and not found:
            os.kill(os.getpid(), signal.SIGKILL)
    print("completed", observe.current_step())
"""


@pytest.mark.slow
def test_two_nodes_restart_together_from_the_checkpoint_with_an_empty_store(
    tmp_path: Path, environment: dict[str, str], write: Write
) -> None:
    environment = {**environment, "SHARDTUNE_SECRET": "a-secret-of-the-tests"}
    script, (port,) = write(GROUP), free_ports(1)
    words = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", 1, "--nproc", 1)
    nodes = [start(tmp_path, environment, *words, "--node-rank", rank, "--", script) for rank in range(2)]
    said = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    for out, err in said:
        assert "world 2 restart 0 found None" in out
        assert "world 2 restart 1 found 3" in out and "completed 6" in out
        assert "was killed by signal 9" in err and "restarting" in err
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("logs/rank-*.log"))) == 2
    assert [event["step"] for event in events(folder, "resume", 1)] == [3]


@pytest.mark.slow
def test_nodes_with_other_arguments_do_not_start(tmp_path: Path, environment: dict[str, str], write: Write) -> None:
    environment = {**environment, "SHARDTUNE_SECRET": "a-secret-of-the-tests"}
    script, (port,) = write("pass"), free_ports(1)
    words = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--nproc", 1)
    nodes = [start(tmp_path, environment, *words, "--node-rank", rank, "--", script, rank) for rank in range(2)]
    said = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], said
    assert all("differ in the command after --" in " ".join(err.split()) for _, err in said)
