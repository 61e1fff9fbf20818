"""What Slurm's commands print about nodes, as several of its releases write it."""

from __future__ import annotations

import pytest

from areal_lora.launcher.slurm import job_query


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ("DOWN*", True),  # 20.11 and older: the node does not answer
        ("DOWN*+DRAIN", True),
        ("DOWN+NOT_RESPONDING", True),
        ("MIXED*+NOT_RESPONDING", True),
        ("FAIL$", True),
        ("ALLOCATED#", False),
        ("IDLE+CLOUD", False),
        ("MIXED+DRAIN", False),
    ],
)
def test_lost_nodes(state: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = f"NodeName=n1 Arch=x86_64 CPUTot=4 State={state} ThreadsPerCore=1"
    monkeypatch.setattr(job_query, "query", lambda *_, **__: (f"{row}\nNodeName=n2 State=IDLE", ""))
    assert job_query.lost_nodes({"n1", "n2"}) == ({"n1"} if lost else set())
