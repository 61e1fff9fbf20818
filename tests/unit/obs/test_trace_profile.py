"""Traces of training steps by torch's profiler."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import record_function

from areal_lora.obs.trace import Spans, profiled

WANTED = [2, 4]


def step() -> None:
    spans = Spans(label=record_function)
    with spans.span("train"), spans.span("optimizer"):
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_a_trace_has_operators_inside_the_spans_of_the_step(tmp_path: Path) -> None:
    with profiled(WANTED, tmp_path / "profile", "math", 4, 0):
        step()
    with gzip.open(tmp_path / "profile" / "math-step-4-rank-0.json.gz") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    times = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events}
    for inner, outer in (("optimizer", "train"), ("aten::mm", "optimizer")):
        assert times[outer][0] <= times[inner][0] <= times[inner][1] <= times[outer][1], (inner, outer)


@pytest.mark.parametrize(("config", "number", "rank"), [([], 2, 0), (WANTED, 3, 0), (WANTED, 2, 1)])
def test_other_steps_and_ranks_write_nothing(tmp_path: Path, config: list[int], number: int, rank: int) -> None:
    with profiled(config, tmp_path / "profile", "math", number, rank):
        step()
    assert not [*tmp_path.iterdir()]


def test_a_step_that_fails_fails_as_it_is_and_a_disk_that_does_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="x"), profiled(WANTED, tmp_path / "profile", "math", 2, 0):
        raise ValueError("x")
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), profiled(WANTED, tmp_path / "file" / "profile", "math", 2, 0):
        step()
    assert "the run continues" in caplog.text
