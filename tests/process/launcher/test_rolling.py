"""``areal-lora restart-servers`` with a real launcher, trainer and controller; the servers are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from areal_lora.cli.stop import restart_servers
from areal_lora.errors import ExitCode
from areal_lora.run_folder.events import RestartEvent, read_events
from areal_lora.run_folder.rendezvous import read_endpoint
from tests.support.e2e.elastic import ElasticRun, elastic_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def pids(run: ElasticRun) -> list[int]:
    found = [read_endpoint(run.run_folder, "server", i) for i in range(3)]
    return [endpoint.pid for endpoint in found if endpoint is not None]


def test_servers_of_the_run_and_one_that_was_added_restart_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with elastic_run(tmp_path, "rollout.servers=2", vllm=False) as run:
        run.wait(lambda: len(run.metrics.steps) > 0 if run.run_folder.metrics.exists() else False, "the first step")
        run.add(1)
        run.wait(lambda: run.members_changed({"server-2"}, "joined"), "joining of the added server")
        before, members = pids(run), len(run.metrics.members)
        capsys.readouterr()
        with pytest.raises(typer.Exit) as ended:
            restart_servers(str(run.folder), 0)
        assert ended.value.exit_code == ExitCode.DONE, run.said()
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "3 of 3 servers restarted", lines
        after = pids(run)
        assert len(before) == len(after) == 3
        assert not set(before) & set(after)
        joined = {name for record in run.metrics.members[members:] for name in record.joined}
        assert joined >= {"server-0", "server-1", "server-2"}
        planned = [
            e.process for e in read_events(run.run_folder) if isinstance(e, RestartEvent) and e.how == "left to restart"
        ]
        assert planned == ["server-0", "server-1"], "the third is of another launcher"
        assert "server-2 left to restart; it is restarted in 0 s" in (tmp_path / "added-0.out").read_text()
        run.wait_steps(1)
