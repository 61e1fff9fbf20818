"""Counts of the package that may only fall, and lines per room, which a new capability may raise by what it needs.

A change that lowers a count lowers its limit in the same commit. A room's limit is raised only in the commit that adds
the capability, with the reason beside the number.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "areal_lora"
WIDTH, OWN_FILES = 34, "own files"

LINES = {
    "": 933,  # undo_on_error; columns of tokens, routes, kept ids; errors of the service; truncated samples; routes
    "algorithms": 1627,  # objectives and masks of 2026; distillation; mismatch by causes; own loss; zero advantages
    "checkpoint": 1468,  # a save starts before its copies are complete; a name taken over; measures; patterns
    "cli": 2387,  # serve-remote; sweep; plan --simulate; pages; chats, kept; restart-servers; proxies; printable text
    "config": 4888,  # remote; slots; cp, profile; routes; GDPO; stages, fp8; formats; ranks; quantised; nodes; merging
    "data": 953,  # checks in chunks; equal attention; clients' order; refused prompts; truncated; appended; tokenizers
    "distributed": 380,  # scatter; the end of a formation; waits of N ranks; decoders
    "doctor": 1054,  # a device for each member of a measurement; the engine of the run; roles as steps of a job; limits
    "engine": 12193,  # seats; routes; kept ids, caches; stages; two runners; streams; stops; shared merging; gradients
    "families": 1555,  # FLOPs of passes; sizes of routes; modules of targets; rope; weight files; target_parameters
    "launcher": 5468,  # virtual time; sweeps; trackers, rolling; first failures; locks, outages; nodes without Slurm
    "library": 474,  # loss, advantage
    "network": 1053,  # listening; types of /v1/tool_calls; the client of served models; parts; idle connections
    "obs": 4669,  # every rollout; trackers; a live page; GPUs; chats; mismatch; joined adapters; damaged files; masks
    "operations": 528,  # the log of what is not durable: Durable, what a checkpoint keeps of it; tokens of a pass
    "platforms": 177,  # ranges of profilers; peaks of devices; two torch versions; upload; lanes of threads; waits
    "processes": 506,  # stacks after a fatal signal; shared_memory, loading; rare collections; printable; files
    "rollout": 9505,  # hung samples; rewards of steps; gateways; leases; workers; OpenEnv; curricula; streams; turns
    "run_folder": 1131,  # remote tokens and keys; sweep.json; sessions; machines; chats; loads; reopened beats; links
    "service": 5403,  # refusals name their field; the log is cut; a quota; decoders; disconnects; states; prefix caches
    "tasks": 3595,  # reward models; mapped rows, rows by column; bad text; tables; golds; verl, TRL; limits of code
    "trainer": 4352,  # parts of a batch, routes, kept ids; kept caches; lengths; truncated; audits; ended adapters
    "weight_sync": 5771,  # gathers; relays: tree, requests; keys; pings; deaths in formation; hung servers; settings
}
"""Lines of each room; those of the package's own files are under the empty name."""
LIMITS: dict[str, float] = {
    "largest folder": 12,
    "share of imports": 0.097,
    "classes over 15 methods": 3,
    "class names used twice": 0,
    "file names used twice": 5,
    "participles as class names": 2,
    "register words per 1,000 lines": 0.17,
    "broad excepts per 1,000 lines": 0.53,
    "longest file": 411,
}
FILES = {"__init__", "main"}
"""Names that every folder may have."""
REGISTER = re.compile(r"\b(asks?|asked|says?|said|hears?|begins?|began|begun|gone|newcomers?|who)\b", re.IGNORECASE)
PARTICIPLE = re.compile(r"(ed|en|own|ost|aid)$")
NOUNS = {"Token", "Embed", "Feed", "Need", "Seed", "Speed", "Queen", "Screen", "Cost", "Host", "Post"}


@cache
def sources() -> dict[Path, str]:
    return {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


@cache
def all_nodes() -> dict[type[ast.AST], list[ast.AST]]:
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            found.setdefault(type(node), []).append(node)
    return found


def nodes(kind: type[ast.AST]) -> list[ast.AST]:
    return all_nodes().get(kind, [])


def lines_by_room() -> Counter[str]:
    rooms: Counter[str] = Counter()
    for path, text in sources().items():
        rooms[path.parts[0] if len(path.parts) > 1 else ""] += text.count("\n")
    return rooms


def twice(names: Iterator[str] | list[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id if isinstance(kind, ast.Name) else str(kind) for kind in kinds}
    return not names.isdisjoint({"None", "Exception", "BaseException"})


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def words(name: str) -> list[str]:
    return re.findall(r"[A-Z][a-z0-9]*", name)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def height(node: ast.AST) -> int:
    assert isinstance(node, ast.stmt)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def per_kilo(found: Iterable[bool]) -> float:
    return round(1e3 * sum(found) / sum(text.count("\n") for text in sources().values()), 2)


@cache
def measured() -> dict[str, float]:
    lines = [line for text in sources().values() for line in text.splitlines()]
    n_code = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)
    n_code -= sum(height(node) for node in nodes(ast.Expr) if is_docstring(node))
    imports = sum(height(node) for kind in (ast.Import, ast.ImportFrom) for node in nodes(kind))
    classes = [node for node in nodes(ast.ClassDef) if isinstance(node, ast.ClassDef)]
    participles = [
        node.name
        for node in classes
        if len(words(node.name)) == 1 and PARTICIPLE.search(node.name) and node.name not in NOUNS
    ]
    handlers = [node for node in nodes(ast.ExceptHandler) if isinstance(node, ast.ExceptHandler)]
    return {
        "lines": len(lines),
        "largest folder": max(Counter(path.parent for path in sources() if path.stem != "__init__").values()),
        "share of imports": round(imports / n_code, 4),
        "classes over 15 methods": sum(methods(node) > 15 for node in classes),
        "class names used twice": twice([node.name for node in classes if not node.name.startswith("_")]),
        "file names used twice": twice([path.stem for path in sources() if path.stem not in FILES]),
        "participles as class names": len(participles),
        "register words per 1,000 lines": per_kilo(bool(REGISTER.search(line)) for line in lines),
        "broad excepts per 1,000 lines": per_kilo(map(is_broad, handlers)),
        "longest file": max(text.count("\n") for text in sources().values()),
    }


@pytest.fixture(scope="module")
def counts() -> dict[str, float]:
    """Counted in a process without other threads: with them, the parser of Python 3.11 may fail."""
    command = [sys.executable, "-m", "tests.repository.test_budgets"]
    lines = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    return {line[:WIDTH].strip(): float(line[WIDTH:]) for line in lines}


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_does_not_rise(name: str, counts: dict[str, float]) -> None:
    assert counts[name] <= LIMITS[name]


@pytest.mark.parametrize("room", LINES)
def test_a_room_does_not_grow(room: str, counts: dict[str, float]) -> None:
    assert counts[room or OWN_FILES] <= LINES[room]


def test_every_room_has_a_limit() -> None:
    assert lines_by_room().keys() == LINES.keys()


if __name__ == "__main__":
    median = statistics.median(text.count("\n") for text in sources().values())
    for key, value in {**measured(), "files": len(sources()), "median file": median, **lines_by_room()}.items():
        print(f"{key or OWN_FILES:{WIDTH}} {value}")
