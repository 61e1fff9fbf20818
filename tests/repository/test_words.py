"""Words that docs/en/glossary.md replaces do not occur in the package, the docs, README and CONTRIBUTING."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

GLOSSARY = ROOT / "docs" / "en" / "glossary.md"
BANNED = {
    "anew": 0,
    "learnt": 0,
    "nobody|everybody|somebody|anybody": 0,
    "under way": 0,
    "(go|goes|went|gone) on": 0,
    "(given|gives|gave|giving) up": 0,
    "told|tells": 0,
    "lives": 0,
    "(come|comes|came) back": 0,
    "(is|are|was|were) left": 0,
    "signs? of life": 0,
    "(be|been) had": 0,
}
"""Pattern of whole words, and how many lines may still hold it; a number may only fall."""


def searched() -> list[Path]:
    docs = [path for path in (ROOT / "docs" / "en").rglob("*.md") if path != GLOSSARY]
    return [*(ROOT / "areal_lora").rglob("*.py"), *docs, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def lines(pattern: str) -> list[str]:
    """``path:line: text`` of every line with the words."""
    words = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    found = []
    for path in searched():
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if words.search(text):
                found.append(f"{path.relative_to(ROOT)}:{number}: {text.strip()}")
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_a_word_that_the_glossary_replaces_does_not_occur(pattern: str) -> None:
    found = lines(pattern)
    assert len(found) <= BANNED[pattern], "see docs/en/glossary.md for the word to use:\n" + "\n".join(found)


def test_the_glossary_is_a_table_without_repeats() -> None:
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for term in terms if term not in ("term", "---", "instead of")]
    assert len(terms) > 40
    assert len(terms) == len(set(terms))
