"""``areal-lora doctor``: whether this machine, or this allocation, can run a configuration."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.status import OptionalFiles, Overrides, find_run, with_overrides
from areal_lora.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from areal_lora.config.models import Config


def doctor(
    overrides: Overrides = None,
    config: OptionalFiles = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="take the configuration of a run")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="without the network's bandwidth and the canary")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="keep the files of the probes, with the canary's logs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object with all findings")] = False,
) -> None:
    """Examine interpreters, devices, network, file system and limits, and send an adapter to a real server.

    Inside a Slurm allocation every node is examined. Exit code 69 if something fails.
    """
    import msgspec

    from areal_lora.doctor.checks import Level
    from areal_lora.doctor.examine import examine

    chosen = chosen_config(config or [], run, overrides or [])
    started = time.monotonic()
    findings = examine(chosen, lambda line: print(line, file=sys.stderr, flush=True), quick=quick, keep=keep)
    failed = sum(finding.level is Level.FAIL for finding in findings)
    took_s = time.monotonic() - started
    if as_json:
        text = {"findings": findings, "failed": failed, "seconds": round(took_s, 1)}
        sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    else:
        for finding in findings:
            print(finding)
        verdict = f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed"
        print(f"{verdict} in {took_s:.0f} s")
    raise typer.Exit(ExitCode.MISSING if failed else ExitCode.DONE)


def chosen_config(files: list[Path], run: str | None, overrides: list[str]) -> Config:
    """The configuration of files or of a run; without either, one process of each role on this machine's CPUs."""
    from areal_lora.config.load import load_config

    if run is not None:
        if files:
            raise ConfigError("--run", "--config was given, too", "name one of both")
        return with_overrides(find_run(run), overrides)
    if files:
        return load_config(files, overrides)
    if overrides:
        raise ConfigError(overrides[0], "an override needs a configuration", "add --config FILE or --run RUN")
    from areal_lora.doctor.canary import canary_config

    return canary_config(Path.cwd() / "runs")
