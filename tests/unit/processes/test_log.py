"""Logging: one line per record whatever a message holds."""

import pytest

from areal_lora.processes.log import get_logger, setup_logging


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
