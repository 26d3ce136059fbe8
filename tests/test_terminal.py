"""What a person reads on a terminal breaks between words; what a program reads is not broken at all."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios

from shardtune.terminal import fitted, wrapped

ERROR = "error: lora.target_modules: 'nope' matches no linear layer of this model at all.\n  why: " + "a word " * 20


def test_every_part_of_an_error_hangs_under_its_own_text() -> None:
    lines = wrapped(ERROR, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("error: ") and lines[1].startswith("       ") and lines[1].strip()
    why = next(i for i, line in enumerate(lines) if line.startswith("  why: "))
    assert lines[why + 1].startswith("       word")


def test_short_lines_and_their_spaces_are_left_alone() -> None:
    text = "  a   table  of\n\n    columns"
    assert wrapped(text, 80) == text and wrapped(text, None) == text


def test_a_log_and_a_traceback_are_not_touched() -> None:
    assert fitted(ERROR, io.StringIO()) == ERROR
    assert fitted(f"Traceback (most recent call last):\n{ERROR}", sys.stdout).endswith(ERROR)


def test_a_real_terminal_is_asked_for_its_width() -> None:
    reader, writer = pty.openpty()
    try:
        with os.fdopen(writer, "w") as stream:
            fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
            assert max(map(len, fitted(ERROR, stream).splitlines())) <= 50
    finally:
        os.close(reader)
