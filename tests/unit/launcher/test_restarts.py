"""Who is started again, when and how often, as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from areal_lora.errors import (
    AlignmentError,
    ConfigError,
    EnvironmentError_,
    ManifestError,
    ParityError,
    PublishError,
    RolloutError,
    StalenessError,
)
from areal_lora.launcher.plan import CONTROLLER, PAGE, SERVER, SERVICE, TRACKER, TRAINER, ProcessSpec
from areal_lora.launcher.restarts import HEALTHY_S, LAUNCHES, OBSERVER_RESTARTS, ProcessExit, Pulse, Restarts, to_blame


def spec(role: str = SERVER, index: int = 0) -> ProcessSpec:
    return ProcessSpec(role=role, index=index, argv=("x",), env={})


def ended(code: int = -9, role: str = SERVER, index: int = 0, why: str = "") -> ProcessExit:
    return ProcessExit(spec=spec(role, index), pid=7, code=code, log=Path("log"), why=why)


def restarts(servers: int = 2, times: int = 3, trainer_times: int = 3) -> Restarts:
    specs = [*(spec(SERVER, i) for i in range(servers)), spec(CONTROLLER), spec(TRAINER, 0), spec(TRAINER, 1)]
    return Restarts(specs, {SERVER: times, CONTROLLER: trainer_times, TRAINER: trainer_times})


def names(units: list[tuple[ProcessSpec, ...]]) -> list[list[str]]:
    return [[s.name for s in unit] for unit in units]


@pytest.mark.parametrize(
    ("dead", "who", "unit"),
    [
        (ended(), "it is", ["server-0"]),
        (ended(role=CONTROLLER), "it is", ["controller-0"]),
        (ended(role=TRAINER, index=1), "all trainer ranks are", ["trainer-0", "trainer-1"]),
    ],
    ids=["server", "controller", "trainer"],
)
def test_a_unit_is_started_again_after_a_while_that_grows_and_so_often(
    dead: ProcessExit, who: str, unit: list[str]
) -> None:
    made, now = restarts(), 0.0
    for times, wait_s in ((1, 1.0), (2, 4.0), (3, 16.0)):
        verdict = made.take(dead, now, worked_s=5.0)
        assert not verdict.ends_run
        name = dead.spec.name
        assert str(verdict) == f"{name} was killed by SIGKILL; {who} restarted in {wait_s:g} s ({times} of 3)"
        assert made.due(now + wait_s - 0.01) == []
        now += wait_s
        assert names(made.due(now)) == [unit]
        assert made.due(now) == []
    verdict = made.take(dead, now, worked_s=5.0)
    assert verdict.ends_run == (dead.spec.role != SERVER), "the run goes on with the other server"
    assert made.due(now + 1000) == []


def test_budgets_are_separate_and_any_rank_uses_the_trainers() -> None:
    made = restarts(trainer_times=2)
    for _ in range(3):
        made.take(ended(), 0.0, 1.0)
    assert not made.take(ended(index=1), 0.0, 1.0).ends_run
    assert not made.take(ended(role=CONTROLLER), 0.0, 1.0).ends_run
    assert not made.take(ended(role=TRAINER, index=0), 0.0, 1.0).ends_run
    assert not made.take(ended(role=TRAINER, index=1), 0.0, 1.0).ends_run
    assert made.take(ended(role=TRAINER, index=0), 0.0, 1.0).ends_run


def test_without_any_server_left_the_run_fails() -> None:
    assert restarts(servers=1, times=0).take(ended(), 0.0, 1.0).ends_run
    made = restarts(servers=2, times=1)
    assert not made.take(ended(), 0.0, 1.0).ends_run
    assert not made.take(ended(index=1), 0.0, 1.0).ends_run
    assert len(made.due(1.0)) == 2
    assert "not restarted" in str(made.take(ended(), 2.0, 1.0))
    assert made.take(ended(index=1), 2.0, 1.0).ends_run


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", "b"),
        EnvironmentError_("x"),
        ParityError("x"),
        StalenessError("x"),
        AlignmentError("x"),
        ManifestError("a", "b"),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("role", [SERVER, CONTROLLER, TRAINER])
def test_what_would_end_the_same_way_is_not_started_again(role: str, error: Exception) -> None:
    assert restarts().take(ended(error.exit_code, role), 0.0, 100.0).ends_run


@pytest.mark.parametrize("error", [PublishError("x"), RolloutError("x")], ids=lambda e: type(e).__name__)
def test_what_may_go_better_is_started_again(error: Exception) -> None:
    assert not restarts().take(ended(error.exit_code, TRAINER), 0.0, 100.0).ends_run


@pytest.mark.parametrize("role", [SERVER, CONTROLLER, TRAINER])
def test_what_failed_before_it_ever_worked_is_started_again_only_if_it_was_killed(role: str) -> None:
    assert restarts().take(ended(1, role), 0.0, None).ends_run
    assert not restarts().take(ended(-9, role), 0.0, None).ends_run
    made = restarts()
    made.take(ended(1, role), 0.0, 2.0)
    assert not made.take(ended(1, role), 0.0, None).ends_run, "an earlier life worked"


def test_servers_that_fail_before_they_ever_worked_end_the_run_once_they_are_half() -> None:
    made = restarts(servers=5, times=1)
    for index in (3, 3, 1, 1):
        assert not made.take(ended(1, index=index), 0.0, None).ends_run
    assert not made.take(ended(1, index=0), 0.0, 1.0).ends_run, "it has worked"
    made_temporary = restarts(servers=5, times=1)
    first, second = (made_temporary.take(ended(75, index=2), 0.0, None) for _ in range(2))
    assert (first.wait_s, second.abandoned) == (1.0, True)
    assert made.take(ended(1, index=4), 0.0, None).ends_run
    assert restarts(servers=5).take(ended(64, index=4), 0.0, None).ends_run, "so would the others"


def test_long_healthy_work_refills_the_budget() -> None:
    made = restarts(trainer_times=1)
    for _ in range(5):
        verdict = made.take(ended(role=TRAINER), 0.0, HEALTHY_S)
        assert (verdict.ends_run, verdict.times, verdict.wait_s) == (False, 1, 1.0)
        made.due(1.0)
    assert made.take(ended(role=TRAINER), 0.0, HEALTHY_S - 1).ends_run


def test_a_trainer_that_dies_at_the_same_step_runs_out_of_budget_however_long_it_works() -> None:
    made, verdicts = restarts(trainer_times=3), []
    for _ in range(5):
        verdicts.append(made.take(ended(1, TRAINER), 0.0, 2 * HEALTHY_S, {"math": 7, "code": 3}))
        made.due(1000.0)
    assert [v.times for v in verdicts[:4]] == [1, 2, 3, 0]
    assert [v.ends_run for v in verdicts[:4]] == [False, False, False, True]


def test_a_new_checkpoint_of_any_adapter_restores_the_budget_only_with_long_work() -> None:
    made, times = restarts(trainer_times=3), []
    for newest, worked_s in (
        ({}, HEALTHY_S),
        ({"math": 0}, HEALTHY_S),  # the first one
        ({"math": 0}, HEALTHY_S),
        ({"math": 0, "code": 0}, HEALTHY_S),
        ({"math": 0, "code": 1}, HEALTHY_S - 1),
        ({"math": 0, "code": 1}, HEALTHY_S),  # of the session before
        ({"math": 5, "code": 1}, HEALTHY_S),
    ):
        times.append(made.take(ended(1, TRAINER), 0.0, worked_s, newest).times)
        made.due(1000.0)
    assert times == [1, 1, 2, 1, 2, 3, 1]


@pytest.mark.parametrize("code", [1, -9, 64, 74])
def test_a_service_that_worked_is_restarted_for_as_long_as_the_run_trains(code: int) -> None:
    made, now = Restarts([spec(SERVICE), spec(TRAINER)], {TRAINER: 1}), 0.0
    waits = []
    for _ in range(2000):
        verdict = made.take(ended(code, SERVICE), now, 1.0)
        assert not verdict.ends_run
        assert verdict.wait_s is not None
        waits.append(verdict.wait_s)
        now += verdict.wait_s
        assert names(made.due(now)) == [["service-0"]]
    assert waits == [1, 4, 16, *[64] * 1997]
    assert "it is restarted in 64 s" in str(verdict)


def test_a_service_that_never_worked_ends_the_run_before_anything_trains() -> None:
    assert Restarts([spec(SERVICE), spec(TRAINER)], {}).take(ended(64, SERVICE), 0.0, None).ends_run


def test_a_server_that_was_asked_to_end_uses_up_nothing() -> None:
    made = restarts(servers=1, times=1)
    for _ in range(4):
        verdict = made.take(ended(75), 0.0, 1.0)
        assert str(verdict) == "server-0 exited with code 75; it is restarted in 1 s"
        made.due(10.0)
    assert not made.take(ended(), 0.0, 1.0).ends_run
    assert made.take(ended(), 0.0, 1.0).ends_run


def test_the_one_to_blame_is_not_a_peer_that_lost_its_connection() -> None:
    lost, killed, says_why = ended(1, TRAINER, 0), ended(-9, TRAINER, 1), ended(65, TRAINER, 2)
    assert to_blame([lost, says_why, killed]) is killed
    assert to_blame([lost, says_why]) is says_why
    assert to_blame([ended(0, TRAINER), lost]) is lost
    assert to_blame([ended(0, TRAINER)]) is None


def test_pulse_measures_silence_from_the_first_beat_and_by_its_own_looks() -> None:
    pulse = Pulse({"trainer": 5.0, "server": 5.0})
    pulse.look({}, 0.0)
    assert pulse.silent(100.0) == {}, "one that has never beaten is still starting"
    pulse.look({"trainer-0": 900, "server-0": 7}, 100.0)
    pulse.look({"trainer-0": 901, "server-0": 7}, 104.0)
    assert pulse.silent(105.0) == {}
    assert pulse.silent(105.5) == {"server-0": 5.5}
    assert (pulse.worked_s("trainer-0"), pulse.worked_s("server-0"), pulse.worked_s("server-1")) == (4.0, 0.0, None)
    pulse.forget("server-0")
    assert pulse.silent(200.0) == {"trainer-0": 96.0}
    assert pulse.worked_s("server-0") is None


def test_each_role_has_its_own_limit() -> None:
    pulse = Pulse({"trainer": 900.0, "controller": 45.0, "server": 45.0})
    names = ("trainer-0", "controller-0", "server-11")
    for now in range(60):
        pulse.look(dict.fromkeys(names, 1), float(now))
    assert pulse.silent(45.0) == {}
    assert pulse.silent(46.0).keys() == {"controller-0", "server-11"}


@pytest.mark.parametrize("stopped_s", [60.0, 8 * 3600.0])
def test_time_in_which_the_launcher_did_not_look_is_nobodys_silence(stopped_s: float) -> None:
    """A machine that was suspended, a virtual one that was moved, a launcher that was stopped: all clocks jump."""
    pulse = Pulse({"trainer": 900.0, "server": 45.0})
    alive = {"trainer-0": 1, "server-0": 1, "server-1": 1}
    now = 0.0
    for now in (0.0, 1.0, 2.0):
        pulse.look(alive, now)
    now += stopped_s
    pulse.look(alive, now)
    assert pulse.silent(now) == {}, "no process has had the time to beat"
    for second in range(1, 46):
        pulse.look(alive | {"server-0": 1 + second}, now + second)
    assert pulse.silent(now + 45.0).keys() == {"server-1"}, "but one that stays silent is found as late as ever"


def test_a_life_that_hangs_does_not_count_as_healthy() -> None:
    """Otherwise a trainer that hangs in its first step would be started again for ever."""
    pulse, made = Pulse({"trainer": 2 * HEALTHY_S}), restarts(trainer_times=1)
    for life in (0.0, 1e5):
        pulse.look({"trainer-0": int(life)}, life)
        now = life + 2 * HEALTHY_S + 1
        assert pulse.silent(now) != {}
        verdict = made.take(ended(role=TRAINER), now, pulse.worked_s("trainer-0"))
        pulse.forget("trainer-0")
    assert verdict.ends_run


def lost(role: str = SERVER, index: int = 0) -> ProcessExit:
    return ProcessExit(spec=spec(role, index), code=1, log=Path("log"), node="n4", lost=True)


def test_a_server_on_a_lost_node_is_abandoned_while_enough_others_remain() -> None:
    made = restarts(servers=3)
    made.min_servers = 2
    verdict = made.take(lost(index=2), 0.0, worked_s=5.0)
    assert (verdict.ends_run, verdict.abandoned) == (False, True)
    assert str(verdict) == "server-2 was lost with node n4; it is not restarted, the other servers continue"
    assert made.due(1000.0) == []
    assert made.take(lost(index=1), 0.0, worked_s=5.0).ends_run, "one server is too few"


@pytest.mark.parametrize("role", [TRAINER, SERVER])
def test_a_lost_node_that_may_return_is_a_failure_within_the_budget(role: str) -> None:
    made = Restarts([spec(SERVER), spec(SERVER, 1), spec(TRAINER)], {SERVER: 1, TRAINER: 1}, nodes_return=True)
    end = replace(lost(role), code=-9)
    verdict = made.take(end, 0.0, worked_s=None)
    assert (verdict.wait_s, verdict.times) == (1.0, 1)
    assert "was lost with node n4; " in str(verdict)
    assert names(made.due(1.0)) == [[end.spec.name]]
    verdict = made.take(end, 2.0, worked_s=1.0)
    assert (verdict.ends_run, verdict.abandoned) == (role == TRAINER, role == SERVER)


@pytest.mark.parametrize("role", [TRAINER, CONTROLLER])
def test_the_run_ends_with_a_lost_node_of_trainer_or_controller(role: str) -> None:
    verdict = restarts().take(lost(role), 0.0, worked_s=5.0)
    assert (verdict.ends_run, verdict.ended.lost) == (True, True)


def test_a_unit_that_its_node_did_not_start_costs_no_budget_and_is_lost_in_the_end() -> None:
    made, now = restarts(times=1, trainer_times=1), 0.0
    never = ProcessExit(spec=spec(TRAINER), code=233, log=Path("log"), node="n4", never_started=True)
    assert not made.take(ended(role=TRAINER), now, worked_s=5.0).ends_run
    for _ in range(LAUNCHES - 1):
        verdict = made.take(never, now, None)
        assert (verdict.ends_run, verdict.wait_s, verdict.times) == (False, 10.0, 0)
        assert names(made.due(now + 10.0)) == [["trainer-0", "trainer-1"]]
        now += 10.0
    verdict = made.take(never, now, None)
    assert (verdict.ends_run, verdict.ended.lost) == (True, True), "the job is requeued to other nodes"


def test_a_unit_that_never_started_at_all_fails_soon_and_is_not_lost() -> None:
    """srun may have been called with options that this Slurm does not know."""
    made = restarts()
    never = ProcessExit(spec=spec(TRAINER), code=1, log=Path("log"), node="n4", never_started=True)
    assert [made.take(never, 0.0, None).ends_run for _ in range(3)] == [False, False, True]
    assert not made.take(never, 0.0, None).ended.lost


@pytest.mark.parametrize(
    ("role", "fix"), [(TRACKER, "areal-lora track RUN sends what is missing"), (PAGE, "areal-lora page RUN")]
)
@pytest.mark.parametrize("code", [-9, 0, 1, 64, 69, 74])
def test_an_observer_is_given_up_after_so_many_failures_and_never_ends_the_run(code: int, role: str, fix: str) -> None:
    made, now, waits = Restarts([spec(role)], {role: OBSERVER_RESTARTS}), 1000.0, []
    dead = ended(code, role)
    while not (verdict := made.take(dead, now, worked_s=None)).abandoned:
        assert not verdict.ends_run
        assert verdict.wait_s is not None
        waits.append(verdict.wait_s)
        now += verdict.wait_s
        assert names(made.due(now)) == [[f"{role}-0"]]
        now += HEALTHY_S - 1
    assert waits == [1.0, 4.0, 16.0, 64.0, 64.0, 64.0, 64.0, 64.0]
    assert not verdict.ends_run
    assert str(verdict).endswith(f"the run continues without it (fix: {fix})")


def test_a_tracker_that_worked_for_long_has_its_whole_budget() -> None:
    made, now = Restarts([spec(TRACKER)], {TRACKER: OBSERVER_RESTARTS}), 1000.0
    for _ in range(3 * OBSERVER_RESTARTS):
        verdict = made.take(ended(69, TRACKER), now, worked_s=None)
        assert (verdict.wait_s, verdict.times) == (1.0, 1)
        assert made.due(now + 1.0)
        now += 1.0 + HEALTHY_S
    lost = ProcessExit(spec=spec(TRACKER), code=1, log=Path("log"), lost=True)
    assert made.take(lost, now, worked_s=None).abandoned


def test_one_that_left_in_its_turn_restarts_at_once_and_keeps_its_budget() -> None:
    made = restarts(times=1)
    for now in range(5):
        verdict = made.take(replace(ended(code=0), planned=True), float(now), worked_s=5.0)
        assert str(verdict) == "server-0 left to restart; it is restarted in 0 s"
        assert names(made.due(float(now))) == [["server-0"]]
    assert made.take(ended(), 9.0, worked_s=5.0).wait_s is not None
