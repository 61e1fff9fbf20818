"""README, pages and design notes are small enough to be read, and their links lead somewhere.

The limits may only fall. A word has a letter or a digit, so the bars of tables do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.docs import PAGES
from tests.support.paths import ROOT

DOCS = ROOT / "docs" / "en"
GENERATED = {"configuration.md", "support.md"}
README_WORDS, README_LINKS = 800, 20
PAGE_WORDS, PAGE_COUNT = 3_050, 14
NOTE_WORDS, NOTE_GROUPS = 600, 5
SUPPORT_ROWS = 60
TOTAL_WORDS = 38_447
LINK = re.compile(r"\]\(([^)\s]+)\)")

WRITTEN = [page for page in PAGES if page.parent == DOCS and page.name not in GENERATED]
GROUPS = sorted(path for path in (DOCS / "design").glob("*.md") if path.name != "README.md")
ALL = [*PAGES, *sorted((DOCS / "design").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def words(text: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of every heading, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert words(text) <= README_WORDS
    assert len(LINK.findall(text)) <= README_LINKS


def test_there_are_few_pages() -> None:
    assert len(WRITTEN) <= PAGE_COUNT
    assert {page.name for page in PAGES if page.parent == DOCS} >= GENERATED


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_a_page_can_be_read_at_once(page: Path) -> None:
    assert words(page.read_text(encoding="utf-8")) <= PAGE_WORDS


def test_the_support_table_is_small() -> None:
    lines = (DOCS / "support.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) <= SUPPORT_ROWS


def test_design_notes_are_short_and_in_groups() -> None:
    assert len(GROUPS) <= NOTE_GROUPS
    index = (DOCS / "design" / "README.md").read_text(encoding="utf-8")
    for group in GROUPS:
        assert f"]({group.name})" in index
        head, *notes = re.split(r"^## ", group.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert notes
        assert {note.split("\n")[0]: words(note) for note in (head, *notes) if words(note) > NOTE_WORDS} == {}


def test_all_of_it_can_be_read() -> None:
    assert (
        sum(words(path.read_text(encoding="utf-8")) for path in (ROOT / "README.md", *DOCS.rglob("*.md")))
        <= TOTAL_WORDS
    )


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if not link.startswith(("http:", "https:"))]
    assert [link for link in links if broken(page, link)] == []


def test_every_page_is_linked_from_the_readme_or_the_index_of_notes() -> None:
    linked = {
        (start.parent / link.partition("#")[0]).resolve()
        for start in (
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            DOCS / "architecture.md",
            DOCS / "design" / "README.md",
        )
        for link in LINK.findall(prose(start))
    }
    assert [page.name for page in (*WRITTEN, *GROUPS) if page not in linked] == []


@pytest.mark.parametrize("link", ["no_page.md", "running.md#no-heading", "#no-heading"])
def test_a_broken_link_is_noticed(link: str) -> None:
    assert broken(DOCS / "running.md", link)
    assert not broken(DOCS / "running.md", "cluster.md#doctor")
