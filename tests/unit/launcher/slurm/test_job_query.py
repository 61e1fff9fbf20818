"""Answers of Slurm's commands, as recorded from Slurm 22.05 and 23.11."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_lora.launcher.slurm.job_query import look, parse_sacct, parse_scontrol

SHOWN = (
    "JobId=7 JobName=a run of mine UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901755 Nice=0 "
    "Account=(null) QOS=(null) JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n4 Dependency=(null) "
    "Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00 TimeLimit=01:00:00 TimeMin=N/A "
    "SubmitTime=2026-01-01T10:00:00 StartTime=2026-01-01T11:00:00 EndTime=Unknown Partition=low NodeList=(null) "
    "NumNodes=1-1 Command=/a path/with=signs WorkDir=/\n"
)
HETEROGENEOUS = (
    "JobId=8 HetJobId=8 HetJobOffset=0 JobName=x JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 "
    "StartTime=2026-01-01T11:00:00 EndTime=2026-01-01T12:00:00 NodeList=g[1-2]\n"
    "JobId=9 HetJobId=8 HetJobOffset=1 JobName=x JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 "
    "StartTime=2026-01-01T11:00:00 EndTime=2026-01-01T12:00:00 NodeList=h1\n"
)
ACCOUNTED = (
    "7|REQUEUED|None|0:0|n1|2026-01-01T10:00:00|2026-01-01T10:30:00\n"
    "7|CANCELLED by 1000|None|0:15|n2|2026-01-01T11:00:00|2026-01-01T11:30:00\n"
)


def test_a_pending_job() -> None:
    (record,) = parse_scontrol(SHOWN, "7")
    assert (record.state, record.reason) == ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n4")
    assert (record.restarts, record.nodes, record.start) == (2, "", "2026-01-01T11:00:00")


def test_a_heterogeneous_job_has_the_nodes_of_all_components() -> None:
    first, _ = parse_scontrol(HETEROGENEOUS, "8")
    assert (first.state, first.nodes) == ("RUNNING", "g[1-2],h1")


def test_exit_code_and_signal() -> None:
    (record,) = parse_scontrol("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=65:9 NodeList=n1\n", "7")
    assert (record.code, record.number) == (65, 9)


def test_the_last_start_of_an_accounted_job() -> None:
    *_, last = parse_sacct(ACCOUNTED, "7")
    assert (last.state, last.by, last.number, last.restarts) == ("CANCELLED", "1000", 15, 1)


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_is_not_known_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look("7").why == "scontrol is not on this machine"
    program(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in look("7").why
    program(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert "there is no accounting" in look("7").why
    assert look("7").forgotten
    program(tmp_path, "sacct", f"printf '{ACCOUNTED.encode('unicode_escape').decode()}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert (look("7").state, look("7").by) == ("CANCELLED", "1000")
