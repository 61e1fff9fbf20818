"""Logging: one line per record whatever a message holds."""

import sys
import unicodedata

import pytest

from areal_lora.processes.log import get_logger, printable, setup_logging


def test_a_message_cannot_forge_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", 3)
    get_logger("areal_lora.trainer.main").warning("model wrote %s", "a\n00:00:00.000 server-0 ERROR x: down")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert " trainer-3 WARNING trainer.main: model wrote a\\n00:00" in lines[0]


def test_second_setup_replaces_the_first_and_tracebacks_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("controller", 0)
    setup_logging("server", 1)
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("__main__").exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert " server-1 ERROR main: failed" in lines[0]
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines[1:])
    assert lines[-1].endswith("ValueError: boom")


def test_no_control_character_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Unicode's category Cc, also in a traceback; other characters stay."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    controls = {c for c in every if unicodedata.category(c) == "Cc"}
    assert len(controls) == 65
    shown = printable(every)
    assert set(shown) & controls == {"\t", "\n"}
    assert set(every) - controls <= set(shown)
    assert printable("a\x1b]52;c;Yg==\x07\x9b2J\x7f\r\tb\n") == "a\\x1b]52;c;Yg==\\x07\\x9b2J\\x7f\\x0d\tb\n"
    setup_logging("controller", 0)
    try:
        raise ValueError("\x1b[1A\x1b[2K and \x9b2J")
    except ValueError:
        get_logger("areal_lora.x").exception("of %s", "\x1b]0;owned\x07\n")
    logged = capsys.readouterr().err
    assert set(logged) & controls == {"\n"}
    assert " x: of \\x1b]0;owned\\x07\\n\n" in logged
    assert "ValueError: \\x1b[1A\\x1b[2K and \\x9b2J" in logged
