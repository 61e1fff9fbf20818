from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import Restarts
from areal_lora.launcher.supervise import Ended


def spec(role: str = "server", index: int = 0) -> ProcessSpec:
    return ProcessSpec(role=role, index=index, argv=("x",), env={})


def ended(code: int = -9, role: str = "server", index: int = 0) -> Ended:
    return Ended(spec=spec(role, index), pid=7, code=code, log=Path("log"))


def restarts(servers: int = 2, times: int = 3, served: bool = True) -> Restarts:
    return Restarts([spec(index=i) for i in range(servers)] + [spec("trainer")], times, lambda _: served)


def test_a_server_is_started_again_after_a_while_that_grows_and_so_often() -> None:
    made, now = restarts(), 0.0
    for times, wait_s in ((1, 1.0), (2, 4.0), (3, 16.0)):
        said = made.take(ended(), now)
        assert said == f"server-0 was killed by SIGKILL; it is started again in {wait_s:g} s ({times} of 3)"
        assert made.due(now + wait_s - 0.01) == []
        now += wait_s
        assert [e.spec.name for e in made.due(now)] == ["server-0"]
        assert made.due(now) == []
    assert made.take(ended(1), now) == "server-0 exited with code 1; it is not started again, the other servers go on"
    assert made.take(ended(index=1), now) is not None  # each has its own budget
    assert made.due(now + 1.0) != []


def test_without_any_server_left_the_run_fails() -> None:
    made = restarts(servers=1, times=0)
    assert made.take(ended(), 0.0) is None
    made = restarts(servers=2, times=1)
    assert made.take(ended(), 0.0) is not None
    assert made.take(ended(index=1), 0.0) is not None
    assert len(made.due(1.0)) == 2
    assert "not started again" in (made.take(ended(), 2.0) or "")
    assert made.take(ended(index=1), 2.0) is None


@pytest.mark.parametrize("code", [0, 64, 69])
def test_what_would_end_the_same_way_is_not_started_again(code: int) -> None:
    assert restarts().take(ended(code), 0.0) is None


def test_a_server_that_never_served_and_other_processes_fail_the_run() -> None:
    assert restarts(served=False).take(ended(), 0.0) is None
    assert restarts().take(ended(role="trainer"), 0.0) is None
    assert restarts().take(ended(role="controller"), 0.0) is None
