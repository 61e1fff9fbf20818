"""Commands in the documentation: every block whose language is ``bash`` or ``console``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "en").glob("*.md")))
LANGUAGES = {"bash", "console", "python", "yaml", "text"}
PROMPT = "$ "


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``text`` has one line, without a comment; ``output`` is what a console block shows below it."""

    page: Path
    text: str
    output: str


def section(page: Path, title: str) -> str:
    """The text below the heading ``title``, up to the next heading that is not below it."""
    level, kept, fenced = 0, [], False
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        marks = 0 if fenced else len(line) - len(line.lstrip("#"))
        if level and 0 < marks <= level:
            break
        if level:
            kept.append(line)
        elif marks and line.strip("# \n") == title:
            level = marks
    assert kept, f"{page.name} has no section {title!r}"
    return "".join(kept)


def blocks(page: Path, title: str | None = None) -> Iterator[Block]:
    """Of the page, or of one of its sections, whose first line then counts as line 1."""
    text = page.read_text(encoding="utf-8") if title is None else section(page, title)
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(page=page, line=text.count("\n", 0, found.start()) + 1, language=found[1], text=found[2])


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        text = re.sub(r" *\\\n *", " ", block.text)
        if block.language == "bash":
            for line in text.splitlines():
                command = re.sub(r"(^|\s+)# .*", "", line)
                if command:
                    yield Command(page=page, text=command, output="")
        elif block.language == "console":
            for part in re.split(rf"^{re.escape(PROMPT)}", text, flags=re.MULTILINE)[1:]:
                first, _, output = part.partition("\n")
                yield Command(page=page, text=first, output=output)


def inline(page: Path) -> Iterator[str]:
    """Text in single backquotes."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
