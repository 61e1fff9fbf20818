"""Why a step ended, as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher.plan import SERVER, TRAINER, ProcessSpec
from areal_lora.launcher.restarts import ProcessExit, to_blame
from areal_lora.launcher.slurm.states import TaskRecords, causes

RANKS = tuple(ProcessSpec(role=TRAINER, index=i, argv=("x",), env={}, node=i) for i in range(3))
ONE = (ProcessSpec(role=SERVER, index=4, argv=("x",), env={}, node=2),)


def ended(
    specs: tuple[ProcessSpec, ...],
    codes: dict[str, int],
    first: str | None = None,
    srun: int = 137,
    lost: tuple[str, ...] = (),
    started: bool = True,
) -> list[ProcessExit]:
    names = [spec.name for spec in specs]
    return causes(
        specs,
        {spec.name: f"n{spec.node}" for spec in specs},
        TaskRecords(codes=codes, started=frozenset(names if started else ()), first=first),
        srun_code=srun,
        lost=lost,
        logs={name: Path(name) for name in names},
        srun_log=Path("srun"),
    )


def blamed(found: list[ProcessExit]) -> ProcessExit:
    cause = to_blame([e for e in found if not e.why])
    assert cause is not None
    return cause


def test_the_first_that_failed_is_the_cause_and_its_killed_peers_are_not() -> None:
    found = ended(RANKS, {"trainer-0": 143, "trainer-1": 65}, first="trainer-1")
    assert (blamed(found).spec.name, blamed(found).code) == ("trainer-1", 65)
    assert [e.why for e in found] == ["was ended", "", "was ended"]


def test_a_killed_process_has_the_code_of_its_signal() -> None:
    assert blamed(ended(RANKS, {"trainer-2": 137}, first="trainer-2")).how() == "was killed by SIGKILL"


def test_all_well() -> None:
    assert [e.code for e in ended(RANKS, {f"trainer-{i}": 0 for i in range(3)}, srun=0)] == [0, 0, 0]


@pytest.mark.parametrize("srun", [0, 137])
def test_a_task_that_could_not_record_is_the_cause_if_no_other_is(srun: int) -> None:
    """srun's code is 0 when the only node of the step was lost."""
    cause = blamed(ended(ONE, {}, srun=srun))
    assert (cause.spec.name, cause.code, cause.lost, cause.never_started) == (
        "server-4",
        -9 if srun else 1,
        False,
        False,
    )
    assert blamed(ended(RANKS, {"trainer-0": 0, "trainer-2": 0})).spec.name == "trainer-1"


def test_a_lost_node_is_the_cause_even_if_its_peers_noticed_first() -> None:
    cause = blamed(ended(RANKS, {"trainer-0": 75, "trainer-1": 143}, first="trainer-0", lost=("n2",)))
    assert (cause.how(), cause.lost) == ("was lost with node n2", True)
    assert [e.lost for e in ended(ONE, {"server-4": 0}, lost=("n2",))] == [False], "it had ended well before"


def test_a_step_that_never_began_shows_what_srun_said() -> None:
    cause = blamed(ended(RANKS, {}, srun=233, started=False))
    assert (cause.never_started, cause.log, cause.how()) == (True, Path("srun"), "could not be started on n0")
