"""A model that was just trained answers: typed commands, a terminal, a browser's requests, and what interrupts them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from journey import Journey

SAID = {"ping": "pong 日本 👩", "Which one?": "That one."}


@contextmanager
def terminal(journey: Journey, *words: object) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(word) for word in words], stdin=slave, stdout=slave, stderr=slave, cwd=journey.folder,
        env={**journey.environment, "TERM": "dumb", "COLUMNS": "100"}, start_new_session=True, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(slave)
    try:
        yield process, master
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C then reaches it as a signal


def until(master: int, text: str, seconds: float = 120, again: bytes = b"") -> str:
    """What is shown up to a text; meanwhile, `again` is typed every 5 seconds."""
    shown, end, typed = "", time.monotonic() + seconds, time.monotonic()
    while text not in shown:
        assert time.monotonic() < end, f"no {text!r} in {shown!r}"
        if again and time.monotonic() > typed + 5:
            os.write(master, again)
            typed = time.monotonic()
        if select.select([master], [], [], 0.2)[0]:
            shown += os.read(master, 65536).decode(errors="replace")
    return shown


def train(journey: Journey, model: Path, rows: Sequence[dict[str, object]], **data: object) -> Path:
    (journey.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    journey.write_config(
        model={"model_name_or_path": str(model), "torch_dtype": "float32"},
        lora={"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data.jsonl", "max_length": 128, **data},
        train={"max_steps": 500, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 100,
               "save_strategy": "no", "warmup_ratio": 0.0},
        parallel={"device": "cpu"},
    )  # fmt: skip
    journey.shardtune("train", "run.yaml")
    return journey.only_run()


@pytest.mark.slow
def test_a_conversation_that_was_learnt_is_answered_everywhere(journey: Journey, chat_model: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in SAID.items()
    ]
    run = train(journey, chat_model, rows)
    words = ["generate", run.name, *(word for asked in SAID for word in ("--prompt", asked))]
    answers = [json.loads(line) for line in journey.shardtune(*words, "--compare", "--json").stdout.splitlines()]
    assert {row["prompt"]: row["tuned"]["text"] for row in answers} == SAID
    assert all(row["tuned"]["ended"] == "end" and row["base"]["text"] != row["tuned"]["text"] for row in answers)
    assert journey.shardtune("generate", run.name, "--prompt", "ping").stdout == SAID["ping"] + "\n"

    with terminal(journey, "shardtune", "chat", run.name) as (process, master):
        until(master, "\n> ")
        os.write(master, b"ping\n")
        until(master, f"{SAID['ping']}\r\n> ")
        os.write(master, b"/help\n")
        assert "/reset" in until(master, "answer)\r\n> ")
        os.write(master, b"\x03")
        until(master, "leaves.", again=b"\x03")  # CPython misses one between readline's prompt and its first select
        os.write(master, b"/quit\n")
        assert process.wait(60) == 0

    endless = ["generate", run.name, "--prompt", "ping", "--temperature", 10, "--seed", 1]
    with terminal(journey, "shardtune", *endless) as (process, master):
        shown = until(master, "seed 1")
        until(master, "\n") if shown.endswith("seed 1") else None
        os.write(master, b"\x03")
        assert process.wait(60) in (0, 130)
    head = f"shardtune generate {run.name} --prompt ping --temperature 10 --seed 1 | head -c 1"
    piped = journey.command("bash", "-o", "pipefail", "-c", head)
    assert "Broken" not in piped.stderr

    with _served(journey, "shardtune", "chat", run.name, "--web", "--port", "0") as (process, url):
        body = {"conversations": {"tuned": [{"role": "user", "content": "ping"}]}}
        asked = urllib.request.Request(
            f"{url}api/answer", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            lines = [json.loads(line) for line in answer.read().splitlines()]
        assert "".join(line.get("text", "") for line in lines) == SAID["ping"]
        with _served(journey, "shardtune", "dashboard", "--port", "0") as (_, dashboard):
            with urllib.request.urlopen(f"{dashboard}api/runs/{run.name}", timeout=60) as answer:
                view = json.load(answer)
            assert view["chat"]["address"] == url and view["ask"] == f"shardtune chat {run} --web"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "Chat stopped." in out and "Traceback" not in err


@contextmanager
def _served(journey: Journey, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        words, cwd=journey.folder, env={**journey.environment, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_was_learnt_through_a_template_is_asked_through_it(journey: Journey, chat_model: Path) -> None:
    rows = [{"question": asked, "answer": answer} for asked, answer in SAID.items()]
    run = train(journey, chat_model, rows, prompt_template="Q: {question}\nA: {answer}")
    for asked, answer in SAID.items():
        done = journey.shardtune("generate", run, "--prompt", asked)
        assert done.stdout == f"{answer}\n" and "data.prompt_template of the run" in done.stderr
    rows_file = journey.shardtune("generate", run.name, "--prompt-file", "data.jsonl", "--json").stdout.splitlines()
    assert [json.loads(line)["tuned"]["text"] for line in rows_file] == list(SAID.values())
    said = subprocess.run(
        ["shardtune", "chat", run.name], input="ping\nWhich one?\n", cwd=journey.folder, env=journey.environment,
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert said.stdout == "".join(f"{answer}\n" for answer in SAID.values())
    assert "each question stands alone" in said.stderr
    refused = journey.shardtune("generate", run.name, "--prompt", "ping", "--system", "Be brief.", expect=2)
    assert "Leave out --system" in refused.stderr
