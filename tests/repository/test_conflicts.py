"""No file holds the markers of a merge that was not resolved."""

import re

from tests.support.paths import ROOT

MARKER = re.compile(r"^(?:<{7}|>{7}|[|]{7}) |^={7}$", re.MULTILINE)
FOLDERS = ("areal_lora", "benchmarks", "containers", "docs", "examples", "requirements", "tests")
TEXT = {".md", ".py", ".yaml", ".json", ".txt", ".sh", ".def", ".Dockerfile", ".toml", ""}


def test_no_conflict_marker_is_kept():
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in TEXT]
    assert len(texts) > 500, "the search for files finds nothing any more"
    names = {str(path.relative_to(ROOT)) for path in texts}
    assert {"CHANGELOG.md", "Makefile", "docs/en/design/README.md"} <= names
    assert [str(path) for path in texts if MARKER.search(path.read_text(encoding="utf-8", errors="replace"))] == []


def test_markers_are_found():
    lines = ["a line", "<" * 7 + " HEAD", "ours", "|" * 7 + " base", "=" * 7, "theirs", ">" * 7 + " other", "====", ""]
    assert len(MARKER.findall("\n".join(lines))) == 4
