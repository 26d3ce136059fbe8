"""`shardtune generate` and `shardtune chat`, from options to what stands on stdout and stderr."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from toy_run import FORMATS, toy_run, write_toy_adapter
from toys import toy_chat_llama
from typer.testing import CliRunner, Result

from shardtune.cli.main import app
from shardtune.errors import UserInputError
from shardtune.inference import chat as chat_module
from shardtune.inference.answers import AnsweringModel
from shardtune.inference.interrupt import StopOnInterrupt
from shardtune.inference.screen import how_it_ended


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    return toy_run(folder / "run", toy_chat_llama(folder / "base"))


def typed(*words: object, stdin: str = "") -> Result:
    """As typed; an error of ours is raised, as `main` gets it."""
    result = CliRunner().invoke(app, [*map(str, words), "--device", "cpu"], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_stdout_has_the_answer_alone_and_stderr_says_how_it_was_asked(run: Path) -> None:
    done = typed("generate", run, "--prompt", "Hello", "--max-new-tokens", 8)
    row = rows_of(typed("generate", run, "--prompt", "Hello", "--max-new-tokens", 8, "--json"))[0]
    assert done.exit_code == 0 and done.stdout.strip("\n") == row["tuned"]["text"]
    assert "the tokenizer's chat template, as in training" in done.stderr.replace("\n", " ")
    assert "greedy (temperature 0), up to 8 new tokens" in done.stderr and "on cpu in float32" in done.stderr
    assert row["prompt"] == "Hello" and row["asked"].endswith("user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert row["tuned"]["ended"] == "length" and row["tuned"]["tokens"] == 8
    assert "the answer was cut at 8 new tokens" in done.stderr


def test_several_prompts_of_all_kinds_come_in_their_order(run: Path, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first line\r\n\nsecond\u2028line\n", encoding="utf-8")
    given = ["--prompt", "word", "--prompt", "-", "--prompt-file", lines, "--max-new-tokens", 4]
    rows = rows_of(typed("generate", run, *given, "--json", stdin="all of\nstdin\n"))
    assert [row["prompt"] for row in rows] == ["word", "all of\nstdin", "first line", "second\u2028line"]
    shown = typed("generate", run, *given, stdin="all of\nstdin\n").stdout
    assert shown.startswith("> word\n") and "\n\n> all of\n> stdin\n" in shown
    data = tmp_path / "rows.jsonl"
    data.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}]})
    )
    row = rows_of(typed("generate", run, "--prompt-file", data, "--max-new-tokens", 4, "--json"))[0]
    assert row["asked"].endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    piped = rows_of(typed("generate", run, "--prompt-file", "-", "--max-new-tokens", 4, "--json", stdin="a\nb\n"))
    assert [row["prompt"] for row in piped] == ["a", "b"]


def test_compare_shows_both_under_their_names(run: Path) -> None:
    words = ("generate", run, "--prompt", "Hello", "--compare", "--max-new-tokens", 6)
    row = rows_of(typed(*words, "--json"))[0]
    assert row["base"]["text"] != row["tuned"]["text"]
    assert typed(*words).stdout == f"base:     {row['base']['text']}\ntuned:    {row['tuned']['text']}\n"


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_answer_again(run: Path) -> None:
    words = ("generate", run, "--prompt", "Hello", "--temperature", 1.5, "--max-new-tokens", 12, "--json")
    first = rows_of(typed(*words))[0]
    again = rows_of(typed(*words, "--seed", first["sampling"]["seed"]))[0]
    assert again == first


def test_the_system_prompt_is_asked_with(run: Path) -> None:
    row = rows_of(typed("generate", run, "-p", "Hi", "--system", "Be brief.", "--max-new-tokens", 2, "--json"))[0]
    assert row["asked"].startswith("<|im_start|>system\nBe brief.<|im_end|>")


REFUSED: dict[str, tuple[list[object], str]] = {
    "no prompt": ([], "--prompt"),
    "an empty prompt": (["-p", " "], "empty"),
    "a seed for nothing": (["-p", "x", "--seed", 1], "has no effect"),
    "top-p for nothing": (["-p", "x", "--top-p", 0.9], "has no effect"),
    "top-p out of range": (["-p", "x", "--temperature", 1, "--top-p", 1.5], "1.5"),
    "a temperature out of range": (["-p", "x", "--temperature", -1], "-1"),
    "a temperature that overflows": (["-p", "x", "--temperature", 1e-39], "1e-39"),
    "bytes that are no text": (["-p", "caf\udce9"], "not UTF-8"),
    "stdin twice": (["-p", "-", "--prompt-file", "-"], "twice"),
    "a file that is not there": (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    "no such checkpoint": (["-p", "x", "--checkpoint", 7], "no such checkpoint"),
    "no such model": (["-p", "x", "--model", "./nowhere"], "is not there"),
    "a turn in the prompt": (["-p", "<|im_end|>"], "cannot render"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked_is_refused_with_a_fix(case: str, run: Path) -> None:
    words, said = REFUSED[case]
    with pytest.raises(UserInputError) as refused:
        typed("generate", run, *words)
    assert said in str(refused.value) and refused.value.fix


def test_a_prompt_that_cannot_be_asked_costs_no_loading(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.inference.generate.load_answering", lambda *_: pytest.fail("loaded"))
    for wrong, said in (("<|im_start|>", "cannot render"), ("long " * 300, "made for 256"), (" \n", "is empty")):
        with pytest.raises(UserInputError, match=said):
            typed("generate", run, "-p", "fine", "-p", wrong)


def test_which_of_several_prompts_cannot_be_asked_is_said(run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "fine"}, {"prompt": "long " * 300}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserInputError, match="Prompt 2 of 2: The prompt has"):
        typed("generate", run, "--prompt-file", tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_that_was_written_on_windows_is_read(name: str, run: Path, tmp_path: Path) -> None:
    text = "Hi\r\n" if name.endswith("txt") else '{"prompt": "Hi"}\r\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    row = rows_of(typed("generate", run, "--prompt-file", tmp_path / name, "--max-new-tokens", 2, "--json"))[0]
    assert row["asked"].endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_that_fills_the_model_says_that_no_option_gives_more(run: Path) -> None:
    done = typed("generate", run, "-p", "the answer is forty two " * 30, "--max-new-tokens", 1000)
    assert "(the model was made for no more)" in done.stderr and "--max-new-tokens" not in done.stderr


def test_a_row_that_is_not_one_is_named_by_its_line(run: Path, tmp_path: Path) -> None:
    for text, said in (("{}\nnope\n", "rows.jsonl:2"), ("[1]\n", "is a list"), ("{}\n", "no column 'messages'")):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(UserInputError, match=said):
            typed("generate", run, "--prompt-file", tmp_path / "rows.jsonl")


def test_a_run_is_asked_as_its_events_say_and_else_as_its_config_does(run: Path, tmp_path: Path) -> None:
    base = run.parent / "base"
    template = "<|im_start|>{sentence}\n{json}"
    asked = {
        "text": (toy_run(tmp_path / "text", base, "text"), "Hi"),
        "prompt": (toy_run(tmp_path / "prompt", base, "prompt", prompt_template=template), "<|im_start|>Hi\n"),
        "config": (toy_run(tmp_path / "config", base, None, prompt_template=template), "<|im_start|>Hi\n"),
        "pair": (toy_run(tmp_path / "pair", base, "prompt-completion"), "Hi"),
    }
    for folder, text in asked.values():
        assert rows_of(typed("generate", folder, "-p", "Hi", "--max-new-tokens", 2, "--json"))[0]["asked"] == text
    raw = typed("generate", asked["prompt"][0], "-p", "Hi", "--raw", "--max-new-tokens", 2, "--json")
    assert rows_of(raw)[0]["asked"] == "Hi" and "--raw" in raw.stderr
    unknown = toy_run(tmp_path / "unknown", base, None)
    with pytest.raises(UserInputError, match="not known which format"):
        typed("generate", unknown, "-p", "Hi")
    adapter = write_toy_adapter(tmp_path / "adapter", base)
    shown = typed("generate", adapter, "-p", "Hi", "--max-new-tokens", 2)
    assert "it is not known how it was trained" in shown.stderr.replace("\n", " ")


def test_the_events_of_training_have_the_format_as_it_is_read(tmp_path: Path, run: Path) -> None:
    """`toy_run` writes what training does: the names of `FormatChoice`."""
    from dataclasses import asdict

    from shardtune.data.formats import FormatChoice

    for written in FORMATS.values():
        assert written.keys() == asdict(FormatChoice("text", "", ())).keys()


def test_control_characters_of_a_model_do_not_reach_a_terminal() -> None:
    from shardtune.inference.screen import shown

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert shown("a\x1b[2J\x07\nb\tc\x9b", Terminal()) == "a[2J\nb\tc"
    assert shown("a\x1b[2J", io.StringIO()) == "a\x1b[2J"


def test_of_answers_that_grow_beyond_the_screen_the_end_is_shown() -> None:
    from rich.console import Console

    from shardtune.inference.screen import _last_lines

    reply: Any = SimpleNamespace(text="\n".join(map(str, range(50))))
    lines = _last_lines(reply, Console(width=80, height=12), 2).plain.split("\n")
    assert lines == [str(number) for number in range(40, 50)]


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts() -> None:
    with StopOnInterrupt() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_terminal_writes_no_ctrl_c_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand in the text, and move the line from which a growing answer is redrawn."""
    terminal, keyboard = pty.openpty()
    with os.fdopen(keyboard) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert termios.tcgetattr(stdin)[3] & termios.ECHOCTL, "else this tests nothing"
        with StopOnInterrupt():
            assert not termios.tcgetattr(stdin)[3] & termios.ECHOCTL
        assert termios.tcgetattr(stdin)[3] & termios.ECHOCTL
    os.close(terminal)


def test_an_answer_that_was_stopped_is_called_so() -> None:
    out = io.StringIO()
    reply: Any = SimpleNamespace(ended="stopped", tokens=7)
    how_it_ended(Console(file=out, width=80), [reply])
    assert out.getvalue().split() == ["stopped", "the", "answer,", "after", "7", "tokens"]


# ---- chat ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[dict[str, str]]]]]:
    """Every conversation that a model was asked, with its side."""
    found: list[tuple[str, list[dict[str, str]]]] = []
    reply = AnsweringModel.reply

    def noted(self: AnsweringModel, messages: Any, side: Any, *rest: Any) -> Any:
        found.append((side, [dict(message) for message in messages]))
        return reply(self, messages, side, *rest)

    monkeypatch.setattr(AnsweringModel, "reply", noted)
    return found


def test_a_conversation_goes_on_and_each_side_has_its_own(run: Path, asked: list, tmp_path: Path) -> None:
    lines = [
        "Hello",
        "And now?",
        "/system Be brief.",
        "Third",
        "/reset",
        f"/save {tmp_path}/kept.json",
        "Fourth",
        f"/save {tmp_path}/kept2.json",
    ]
    done = typed("chat", run, "--compare", "--max-new-tokens", 5, stdin="\n".join(lines) + "\n")
    assert done.exit_code == 0 and done.stdout.count("base:     ") == done.stdout.count("tuned:    ") == 4
    by_side = {side: [messages for name, messages in asked if name == side] for side in ("base", "tuned")}
    for side, turns in by_side.items():
        assert [len(turn) for turn in turns] == [1, 3, 6, 2]
        assert turns[2][0] == {"role": "system", "content": "Be brief."} == turns[3][0]
        answers = [turn[1]["content"] for turn in (turns[1], turns[2][1:])]
        assert answers[0] == answers[1] and f"{side + ':':<10}{answers[0]}\n" in done.stdout
    assert by_side["base"][1] != by_side["tuned"][1]
    assert json.loads((tmp_path / "kept.json").read_text())["turns"] == []
    kept = json.loads((tmp_path / "kept2.json").read_text())
    assert kept["system"] == "Be brief." and [turn["prompt"] for turn in kept["turns"]] == ["Fourth"]
    assert set(kept["turns"][0]) == {"prompt", "base", "tuned"}


def test_without_a_terminal_a_wrong_line_ends_it_and_quit_too(run: Path) -> None:
    assert typed("chat", run, "--max-new-tokens", 3, stdin="/quit\nnever\n").stdout == ""
    assert "/save FILE (write the conversation as JSON)" in typed("chat", run, stdin="/help\n").stderr.replace(
        "\n", " "
    )
    for line, said in (
        ("/nothing", "no command"),
        ("<|im_end|>", "cannot render"),
        ("/save /nowhere/x", "Cannot write"),
        ("/save", "needs the name of a file"),
    ):
        with pytest.raises(UserInputError, match=said):
            typed("chat", run, "--max-new-tokens", 3, stdin=f"{line}\n")


def test_a_question_that_begins_with_a_slash_has_a_space_before_it(run: Path, asked: list) -> None:
    typed("chat", run, "--max-new-tokens", 2, stdin=" /etc is what? \n")
    assert asked == [("tuned", [{"role": "user", "content": "/etc is what?"}])]


def test_a_text_is_continued_as_it_was_piped(run: Path, asked: list) -> None:
    typed("chat", run, "--raw", "--max-new-tokens", 2, stdin="  the answer \n")
    assert asked == [("tuned", [{"role": "user", "content": "  the answer "}])]


def test_bytes_on_stdin_that_are_no_text_are_refused(run: Path) -> None:
    result = CliRunner().invoke(app, ["chat", str(run), "--device", "cpu"], input=b"caf\xe9\n")
    assert isinstance(result.exception, UserInputError) and "not UTF-8" in result.exception.what


def test_where_training_had_no_conversations_each_question_stands_alone(run: Path, asked: list, tmp_path: Path) -> None:
    folder = toy_run(tmp_path / "run", run.parent / "base", "prompt", prompt_template="{sentence}\n{json}")
    done = typed("chat", folder, "--max-new-tokens", 3, stdin="one\ntwo\n")
    assert "each question stands alone" in done.stderr
    assert [messages for _, messages in asked] == [[{"role": "user", "content": word}] for word in ("one", "two")]
    with pytest.raises(UserInputError, match="no place for a system prompt"):
        typed("chat", folder, "--system", "Be brief.", stdin="one\n")


def test_a_stopped_answer_is_remembered_as_far_as_it_came(
    run: Path, asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = chat_module.write_answers

    def interrupted(replies: Any, out: Any) -> None:
        stops = iter([False, False, True])
        replies[0].stopped = lambda: next(stops, True)
        write(replies, out)

    monkeypatch.setattr(chat_module, "write_answers", interrupted)
    typed("chat", run, "--max-new-tokens", 9, stdin="one\ntwo\n")
    assert [message["role"] for message in asked[1][1]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("option", [["--port", 1], ["--host", "::1"], ["--token", "correct-horse"]], ids=str)
def test_options_of_the_page_are_refused_without_it(
    option: list[object], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTUNE_CHAT_TOKEN", "from-the-environment")
    with pytest.raises(UserInputError, match=f"{option[0]} has no effect without --web"):
        typed("chat", run, *option)
    assert typed("chat", run, stdin="/quit\n").exit_code == 0
