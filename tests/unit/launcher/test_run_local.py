"""Supervision with small real processes: what is reported, and that nothing remains."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_lora.errors import EnvironmentError_, ExitCode, ProcessFailed
from areal_lora.launcher import supervise
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.supervise import Supervisor
from areal_lora.run_folder.events import count_restarts, last_end
from areal_lora.run_folder.paths import RunFolder
from tests.support.e2e.kills import runs
from tests.support.launcher.drive import LATER
from tests.support.launcher.driven import Run

FOREVER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"


def test_trainer_rank_0_ending_well_ends_the_run(begin: Callable[..., Run]) -> None:
    run = begin(("server", 0, FOREVER), ("controller", 0, FOREVER), ("trainer", 0, "print('done')"))
    code, output = run.end()
    assert code == 0, output
    assert run.log("trainer-0") == "done\n"
    assert run.alive() == []


def test_another_rank_may_end_before_rank_0(begin: Callable[..., Run]) -> None:
    run = begin(("trainer", 0, "import time; time.sleep(0.8)"), ("trainer", 1, ""), ("controller", 0, ""))
    assert run.end()[0] == 0


def test_first_failure_is_reported_with_its_last_lines(begin: Callable[..., Run]) -> None:
    noisy = "import sys\nfor i in range(100): print('line', i)\nsys.exit('[bold]the reason[/]')"
    run = begin(("server", 0, FOREVER), ("controller", 0, noisy), ("trainer", 0, FOREVER))
    code, output = run.end()
    assert code == 70
    assert "controller-0 exited with code 1" in output
    assert "[bold]the reason[/]" in output, "text of a log is not markup"
    assert "line 71" in output
    assert "line 70" not in output, "30 lines"
    assert run.alive() == []
    assert output.splitlines()[-1] == f"report   {run.folder / 'report.html'}"
    assert "Ended with exit code 70: controller-0 exited with code 1" in (run.folder / "report.html").read_text()


def test_a_tracker_that_fails_does_not_end_the_run_and_one_that_works_gets_time_at_the_end(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    trainer = f"import time, os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    slow = f"{trainer}\ntime.sleep(2)\nprint('sent')"
    refused = "print('areal_lora.errors.EnvironmentError_: MLflow: refused (fix: x)'); raise SystemExit(69)"
    run = begin(("tracker", 0, refused), ("tracker", 1, slow), ("trainer", 0, trainer))
    run.wait_for(lambda: run.log("tracker-0").count("refused") == 2)
    go.touch()
    code, output = run.end()
    assert code == 0, output
    assert "tracker-0 exited with code 69: areal_lora.errors.EnvironmentError_: MLflow: refused (fix: x); " in output
    assert "it is restarted in 0.1 s (1 of 8)" in output
    assert run.log("tracker-1") == "sent\n"
    assert run.alive() == []


def test_the_address_of_each_page_is_printed_once_and_its_end_does_not_end_the_run(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    first, fail, done = (tmp_path / name for name in ("first", "fail", "done"))
    until = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)\n"
    page = f"""import os
n = 1 + os.path.exists({str(first)!r})
open({str(first)!r}, "w").close()
with open({str(tmp_path / "new")!r}, "w") as file:
    file.write(f"http://127.0.0.1:{{n}}/token/")
os.replace({str(tmp_path / "new")!r}, "page.address")
while n > 1:
    time.sleep(1)
"""
    page = f"import time\n{page}{until.format(str(fail))}raise SystemExit(1)"
    run = begin(
        ("page", 0, f"import os\nos.chdir({str(tmp_path / 'run')!r})\n{page}"), ("trainer", 0, until.format(str(done)))
    )
    run.wait_for(lambda: "page: http://127.0.0.1:1/token/" in run.printed)
    fail.touch()
    run.wait_for(lambda: "page: http://127.0.0.1:2/token/" in run.printed)
    done.touch()
    code, output = run.end()
    assert code == 0, output
    assert output.count("page: ") == 2
    assert "page-0 exited with code 1; it is restarted in 0.1 s (1 of 8)" in output
    assert run.alive() == []


def test_process_killed_from_outside_is_named(begin: Callable[..., Run]) -> None:
    run = begin(
        ("server", 0, "import os; print(os.getpid()); import time; time.sleep(600)"),
        ("trainer", 0, FOREVER),
        overrides=["run.max_restarts=0"],
    )
    run.wait_for(lambda: run.log("server-0").strip().isdecimal())
    os.kill(int(run.log("server-0")), signal.SIGKILL)
    code, output = run.end()
    assert code == 70
    assert "server-0 was killed by SIGKILL" in output


def test_a_process_that_outlives_sigkill_is_an_error_not_an_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were stuck in a driver: the signal does nothing."""
    monkeypatch.setattr(supervise, "kill_sessions", lambda leaders: None)
    monkeypatch.setattr(supervise, "KERNEL_S", 0.2, raising=False)
    spec = ProcessSpec(role="server", index=0, argv=(sys.executable, "-c", FOREVER), env={})
    with Supervisor(tmp_path, 3.0) as supervisor:
        supervisor.start([spec])
        with pytest.raises(ProcessFailed, match=r"server-0 is still there 0\.2 s after SIGKILL"):
            supervisor.end([spec])


def test_missing_interpreter_is_one_line_and_stops_the_others(tmp_path: Path) -> None:
    good = ProcessSpec(role="server", index=0, argv=(sys.executable, "-c", FOREVER), env={})
    bad = ProcessSpec(role="trainer", index=0, argv=("/no/such/python",), env={})
    with Supervisor(tmp_path, 3.0) as supervisor:
        with pytest.raises(EnvironmentError_, match=r"trainer-0 cannot be started with /no/such/python"):
            supervisor.start([good, bad])
    assert [p for p in psutil.Process().children() if runs(p, FOREVER)] == []


def test_an_error_of_the_launcher_itself_is_the_end_of_the_run(begin: Callable[..., Run]) -> None:
    run = begin(("server", 0, FOREVER), ("trainer", 0, ["/no/such/python"]))
    code, output = run.end()
    assert code == ExitCode.FAILED, "the command line prints the error"
    assert "EnvironmentError_: trainer-0 cannot be started with /no/such/python" in output
    assert (end := last_end(RunFolder(run.folder))) is not None
    assert end.code == ExitCode.MISSING
    assert str(end).startswith("its launcher failed: trainer-0 cannot be started with /no/such/python: No such file")
    assert run.alive() == []


# A process whose child leaves the session, ignores SIGTERM and outlives its parent.
GRANDPARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_nothing_behind(begin: Callable[..., Run], number: signal.Signals) -> None:
    run = begin(("server", 0, GRANDPARENT), ("trainer", 0, STUBBORN), grace_s=1.0)
    run.wait_for(lambda: "ready" in run.log("server-0"))
    run.process.send_signal(number)
    code, output = run.end()
    assert code == 130
    assert "Interrupted" in output
    assert run.alive() == []


def test_second_interrupt_kills_at_once(begin: Callable[..., Run]) -> None:
    told = STUBBORN.replace("signal.SIG_IGN", "lambda *_: print('polite', flush=True)")
    run = begin(("trainer", 0, told), grace_s=600.0)
    run.wait_for(lambda: "ready" in run.log("trainer-0"))
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "polite" in run.log("trainer-0"))
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert run.alive() == []


def test_polite_stop_lets_a_process_finish(begin: Callable[..., Run]) -> None:
    tidy = (
        "import signal, sys, time\n"
        "def bye(*_): time.sleep(0.3); print('tidied'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye); print('ready'); time.sleep(600)"
    )
    run = begin(("server", 0, tidy), ("trainer", 0, FOREVER), grace_s=100.0)
    run.wait_for(lambda: "ready" in run.log("server-0"))
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert "tidied" in run.log("server-0")


def test_killed_launcher_leaves_nothing_either(begin: Callable[..., Run]) -> None:
    grandparent = GRANDPARENT.replace("start_new_session=True", "")
    run = begin(("server", 0, STUBBORN), ("trainer", 0, grandparent))
    run.wait_for(lambda: "ready" in run.log("server-0") and "ready" in run.log("trainer-0"))
    run.process.kill()
    run.wait_for(lambda: run.alive() == [])


def test_shared_memory_of_killed_processes_is_removed(begin: Callable[..., Run]) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    name = f"areal_lora_test_{uuid.uuid4().hex}"
    other = Path("/dev/shm") / f"{name}_other"
    hold = f"import mmap, time\nf = open('/dev/shm/{name}', 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\n"
    run = begin(("server", 0, hold + STUBBORN), ("trainer", 0, FOREVER), grace_s=0.3)
    try:
        run.wait_for(lambda: "ready" in run.log("server-0"))
        other.write_bytes(b"not of this run")
        run.process.send_signal(signal.SIGINT)
        assert run.end()[0] == 130
        assert not (Path("/dev/shm") / name).exists()
        assert other.exists()
    finally:
        other.unlink(missing_ok=True)


def test_semaphores_of_killed_processes_are_removed(begin: Callable[..., Run]) -> None:
    """Those of multiprocessing: mapped under a name that they have no more."""
    hold = "from multiprocessing import get_context\nlock = get_context('spawn').Lock()\nprint(lock._semlock.name)\n"
    run = begin(("server", 0, hold + STUBBORN), ("trainer", 0, FOREVER), grace_s=0.3)
    run.wait_for(lambda: "ready" in run.log("server-0"))
    semaphore = Path(f"/dev/shm/sem.{run.log('server-0').splitlines()[0].removeprefix('/')}")
    assert semaphore.exists()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert not semaphore.exists()


def test_rank_variables_of_the_caller_do_not_leak(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_PORT", "1")
    run = begin(("trainer", 0, "import os; print(sorted({'RANK', 'MASTER_PORT'} & set(os.environ)))"))
    assert run.end()[0] == 0
    assert run.log("trainer-0") == "[]\n"


SERVES_ONCE = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path({folder!r})
(folder / "rendezvous").mkdir(exist_ok=True, parents=True)
(folder / "rendezvous" / "server-0.json").write_text('{{"host": "h", "ports": {{}}, "pid": 1}}')
lives = folder / "lives"
lives.write_text(str(int(lives.read_text()) + 1) if lives.exists() else "1")
print("life", lives.read_text())
if lives.read_text() == "1":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "left").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
WAITS_FOR_TWO = """
import pathlib, time
lives = pathlib.Path({folder!r}) / "lives"
while not lives.exists() or lives.read_text() != "2": time.sleep(0.05)
"""


def test_a_server_that_was_killed_is_started_again_and_the_run_goes_on(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    run = begin(("server", 0, SERVES_ONCE.format(folder=folder)), ("trainer", 0, WAITS_FOR_TWO.format(folder=folder)))
    code, output = run.end()
    assert code == 0, output
    assert "server-0 was killed by SIGKILL; it is restarted in 0.1 s (1 of 3)" in output
    first, mark, second = run.log("server-0").splitlines()
    assert (first, second) == ("life 1", "life 2")
    assert mark.startswith("---- server-0 starts again, 20")
    left = int((tmp_path / "run" / "left").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert run.alive() == []


RANK = """
import fcntl, os, pathlib, signal, sys, time
from areal_lora.run_folder.rendezvous import publish_endpoint, read_endpoint
from areal_lora.processes import stacks
from areal_lora.processes.watched import reached
from areal_lora.run_folder.status import beat
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
folder, role, index = RunFolder.of({folder!r}), {role!r}, {index}
stacks.install(folder.stack_dump(f"{{role}}-{{index}}"))
alone = open(folder.path / f"{{role}}-{{index}}.lock", "w")
fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where an earlier life is still there
if read_endpoint(folder, role, index) is None:
    print("no old ports")
print("started")
publish_endpoint(folder, role, index, {{}})
for other in {others}:
    while read_endpoint(folder, *other) is None:
        time.sleep(0.05)
for step in range({steps}):
    if {beats}:
        set_status(folder, role, index, f"step {{step}}")
        beat(folder, role, index)
    reached(f"{{role}}-{{index}}.step")
    time.sleep(0.02)
{last}
"""


STARTED_AGAIN = 'while (folder.logs / "{}.log").read_text().count("started") < 2: time.sleep(0.05)'
ONCE = "step == 4 and not any(pathlib.Path({!r}).iterdir())"
"""Just before the fault of the fifth step: the silence that follows is the fault's and no busy machine's."""


def rank(
    tmp_path: Path,
    role: str,
    index: int,
    steps: int = 30_000,
    beats: bool | str = True,
    last: str = "",
    others: tuple[tuple[str, int], ...] = (),
) -> Any:
    """A process that waits for ``others``, then takes ``steps``, of which those of the expression ``beats`` beat."""
    parts = {"role": role, "index": index, "steps": steps, "beats": beats, "last": last, "others": others}
    return role, index, RANK.format(folder=str(tmp_path / "run"), **parts)


def set_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("AREAL_LORA_FAULT", f"once={marks}:{fault}")


def test_the_controller_is_started_again_without_the_others(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, tmp_path, "controller-0.step:5:kill")
    last = STARTED_AGAIN.format("controller-0")
    run = begin(
        rank(tmp_path, "server", 0),
        rank(tmp_path, "controller", 0, others=(("server", 0), ("trainer", 0))),
        rank(tmp_path, "trainer", 0, steps=5, last=last),
    )
    code, output = run.end()
    assert code == 0, output
    assert "controller-0 was killed by SIGKILL; it is restarted in 0.1 s (1 of 3)" in output
    assert [run.log(name).count("started") for name in ("server-0", "controller-0", "trainer-0")] == [1, 2, 1]
    assert run.log("controller-0").count("no old ports") == 2, "whoever reads them waits for the new ones"
    assert count_restarts(RunFolder(run.folder)) == {"controller-0": 1}
    assert run.alive() == []


def test_a_restarted_process_may_take_longer_to_its_first_beat_than_a_stall(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats of the life before do not count: what loads a large model is silent for long."""
    set_fault(monkeypatch, tmp_path, "controller-0.step:5:kill")
    monkeypatch.setenv("HEARTBEAT_TIMEOUT_S", "1")
    beats = ONCE.format(str(tmp_path / "marks"))
    role, index, code = rank(tmp_path, "controller", 0, beats=beats, others=(("trainer", 0),))
    mark = tmp_path / "second"
    loads = f"import pathlib, time; m = pathlib.Path({str(mark)!r}); time.sleep(3 * m.exists()); m.touch()\n"
    last = STARTED_AGAIN.format("controller-0")
    run = begin((role, index, loads + code), rank(tmp_path, "trainer", 0, steps=5, beats=False, last=last))
    code, output = run.end()
    assert code == 0, output
    assert "no heartbeat" not in output
    assert count_restarts(RunFolder(run.folder)) == {"controller-0": 1}
    assert run.log("controller-0").count("started") == 2


def test_a_rank_that_ended_well_beside_one_that_failed_is_not_missed_later(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is done, then rank 0 dies: both start again, and the end of the earlier rank 1 is forgotten.

    An hour passes for the launcher when both are there again.
    """
    later = tmp_path / "later"
    monkeypatch.setenv(LATER, f"3600:3600:{later}")
    set_fault(monkeypatch, tmp_path, "trainer-0.step:8:kill")
    stays = 'if (folder.logs / "trainer-1.log").read_text().count("started") == 2: time.sleep(600)'
    last = f"{STARTED_AGAIN.format('trainer-1')}\npathlib.Path({str(later)!r}).touch()\ntime.sleep(0.5)"
    run = begin(
        rank(tmp_path, "trainer", 0, steps=10, last=last, others=(("trainer", 1),)),
        rank(tmp_path, "trainer", 1, steps=2, beats=False, last=stays),
    )
    code, output = run.end()
    assert code == 0, output
    assert count_restarts(RunFolder(run.folder)) == {"trainer": 1}


@pytest.mark.parametrize("dead", [0, 1])
def test_all_trainer_ranks_end_with_one_and_start_together(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    set_fault(monkeypatch, tmp_path, f"trainer-{dead}.step:5:kill")
    waits, steps = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", 3 if dead == 0 else 30_000
    last = STARTED_AGAIN.format("trainer-1")
    run = begin(
        rank(tmp_path, "server", 0),
        rank(tmp_path, "trainer", 0, steps=8, last=last, others=(("server", 0), ("trainer", 1))),
        rank(tmp_path, "trainer", 1, beats=False, steps=steps, last=waits, others=(("server", 0), ("trainer", 0))),
        grace_s=0.5,
    )
    code, output = run.end()
    assert code == 0, output
    line = f"trainer-{dead} was killed by SIGKILL; all trainer ranks are restarted in 0.1 s (1 of 3)"
    assert line in output
    assert output.count("restarted in") == 1, output
    assert [run.log(name).count("started") for name in ("server-0", "trainer-0", "trainer-1")] == [1, 2, 2]
    assert run.alive() == []


def test_an_error_that_would_repeat_ends_the_run_with_its_code(begin: Callable[..., Run], tmp_path: Path) -> None:
    reason = "AlignmentError: the batch is shifted (fix: look at it)"
    last = f"print('12:00:00.000 trainer-0 ERROR trainer.main: {reason}', flush=True); sys.exit(65)"
    run = begin(rank(tmp_path, "server", 0), rank(tmp_path, "trainer", 0, steps=5, last=last))
    code, output = run.end()
    assert code == 65, output
    assert f"trainer-0 exited with code 65: {reason}." in output
    assert "restarted in" not in output
    end = last_end(RunFolder(run.folder))
    assert end is not None
    assert (end.code, end.process, end.how, end.error) == (65, "trainer-0", "exited with code 65", reason)


def test_restarts_run_out(begin: Callable[..., Run], tmp_path: Path) -> None:
    run = begin(
        rank(tmp_path, "server", 0),
        rank(tmp_path, "trainer", 0, steps=2, last="sys.exit('out of luck')"),
        overrides=["run.max_restarts=1"],
    )
    code, output = run.end()
    assert code == 70, output
    assert "trainer-0 exited with code 1; all trainer ranks are restarted in 0.1 s (1 of 1)" in output
    assert "out of luck" in output
    assert run.alive() == []


def test_only_a_new_checkpoint_restores_the_trainers_budget(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three sessions leave one each. Without the rule the fourth would not be the last."""
    monkeypatch.setenv("HEALTHY_S", "0")
    saves = (
        "life = (folder.logs / 'trainer-0.log').read_text().count('started')\n"
        "(folder.adapter_checkpoints('gsm8k') / f'v{min(life, 3):06d}').mkdir(parents=True, exist_ok=True)\n"
        "sys.exit('died at the same step' if life < 8 else 0)"
    )
    run = begin(rank(tmp_path, "trainer", 0, steps=2, last=saves), overrides=["run.max_restarts=1"])
    code, output = run.end()
    assert code == 70, output
    assert run.log("trainer-0").count("started") == 4
    assert output.count("all trainer ranks are restarted in 0.1 s (1 of 1)") == 3


def test_a_stuck_process_leads_to_stacks_of_all_and_is_started_again(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, tmp_path, "trainer-0.step:5:hang")
    monkeypatch.setenv("WRITE_S", "10")
    beats, others = ONCE.format(str(tmp_path / "marks")), (("server", 0), ("controller", 0), ("trainer", 1))
    run = begin(
        rank(tmp_path, "server", 0),
        rank(tmp_path, "controller", 0),
        rank(tmp_path, "trainer", 0, steps=6, beats=beats, last=STARTED_AGAIN.format("trainer-1"), others=others),
        rank(tmp_path, "trainer", 1, beats=False),
        overrides=["run.stall_s=2"],
    )
    code, output = run.end()
    assert code == 0, output
    file = tmp_path / "run" / "stacks" / "stall-1.txt"
    [line] = [line for line in output.splitlines() if "stacks" in line]
    assert f"trainer-0 sent no heartbeat for 2 s; the stacks of all processes are in {file}; " in line
    assert "trainer-0: step 4" in line, "what each was waiting for"
    assert "trainer-0 sent no heartbeat for 2 s; all trainer ranks are restarted in 0.1 s (1 of 3)" in output
    text = file.read_text()
    sections = {part.partition(":")[0]: part for part in text.split("==== ")[1:]}
    assert sections.keys() >= {"controller-0", "server-0", "trainer-0", "trainer-1"}
    assert all("Current thread" in part for part in sections.values()), text
    assert "watched.py" in sections["trainer-0"], "where it hangs"
    assert not file.with_name("stall-2.txt").exists()
    assert [run.log(name).count("started") for name in ("server-0", "trainer-0", "trainer-1")] == [1, 2, 2]
    assert run.alive() == []
