"""Answers of versions: kept as lines, the newest shown side by side, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.errors import ConfigError
from areal_lora.obs.report.version_answers import (
    SHOWN,
    SHOWN_CHARS,
    VersionAnswers,
    answers_section,
    read_answers,
    save_answers,
)
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.page import Page

ATTACK = "<script>alert(1)</script></pre>"


def saved(prompt: str, answer: str = "4", gold: str = "") -> VersionAnswers:
    answers = {"math@v3": answer, f"{ATTACK}@v7": f"not {answer}"}
    return VersionAnswers(at="2026-01-01T00:00:00Z", prompt=prompt, gold=gold, answers=answers)


def test_the_newest_are_shown_as_text_newest_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert answers_section(folder) == ""
    for number in range(SHOWN + 5):
        save_answers(folder, saved(f"{ATTACK} {number}.", "x" * SHOWN_CHARS if number else "y", gold=ATTACK))
    with folder.answers.open("ab") as file:
        file.write(b'{"at": "a process was kil')
    found = read_answers(folder)
    assert [int(each.prompt.split()[-1][:-1]) for each in found] == [*range(SHOWN + 4, 4, -1)]
    page = Page(answers_section(folder))
    assert set(page.tags) == {"section", "h2", "h3", "h4", "pre", "div"}
    assert page.tags.count("h4") == 2 * SHOWN
    assert page.text.count(ATTACK) == 3 * SHOWN, "prompts, golden answers, names"
    assert f"{'x' * SHOWN_CHARS}{ATTACK}" in page.text
    assert f"{SHOWN_CHARS + 4} characters" in page.text, "of a longer one its start"


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save_answers(folder, saved("p"))
    with folder.answers.open("ab") as file:
        file.write(b'{"at": 3}\n')
    with pytest.raises(ConfigError, match=r"answers\.jsonl:2: it holds no answers: .*remove the line"):
        read_answers(folder)
