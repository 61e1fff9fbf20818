"""Verbs that take a configuration (``train``, ``resume``, ``plan``, ``doctor``) or change the servers of a run."""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from areal_lora.cli.find_run import Files, OptionalFiles, Overrides, Run, find_run, with_overrides
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.doctor.checks import Level
from areal_lora.doctor.examine import canary_config, examine
from areal_lora.errors import ConfigError, ExitCode
from areal_lora.launcher import spares, sweep as sweeps
from areal_lora.launcher.dry_run import explain_resume as resume_lines, print_plan
from areal_lora.launcher.plan import SERVER
from areal_lora.launcher.run import prepare, run as start
from areal_lora.launcher.slurm.job_steps import SpareJob
from areal_lora.obs.console import run_console
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.warnings import bill, bill_lines


def train(
    config: Files,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved plan and start nothing")] = False,
    details: Annotated[bool, typer.Option("--details", help="with --dry-run: also processes, ports and files")] = False,
    explain_resume: Annotated[
        bool, typer.Option("--explain-resume", help="print what a start would restore; start nothing")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="take adapters while the run works, over HTTP and from its inbox")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="move a previous run aside and start a new one")] = False,
) -> None:
    """Train here, or submit a Slurm job. The same command resumes the run in its folder."""
    if details and not dry_run:
        raise ConfigError("--details", "it belongs to --dry-run", "give --dry-run, too")
    parts: list[Path | dict[str, Any]] = [{"service": {"api": {}}}] if serve else []
    chosen = load_config([*parts, *config], overrides or [])
    if dry_run:
        command = ["train", *_files(config), *(overrides or []), *["--serve"] * serve, *["--fresh"] * fresh]
        print_dry_run(chosen, command, fresh=fresh, details=details)
    elif explain_resume:
        prepared = prepare(chosen, Console(stderr=True, highlight=False), fresh=fresh, starts=False)
        print(*resume_lines(prepared.config), sep="\n")
    else:
        raise typer.Exit(start(chosen, fresh=fresh))


def sweep(
    words: Annotated[
        list[str], typer.Argument(metavar="[FILE]... a.b=[c,d]...", help="files; overrides, of which lists are swept")
    ],
    config: OptionalFiles = None,
    rungs: Annotated[str, typer.Option(metavar="PARTS", help="parts of the steps, such as 1/4,1/2")] = "",
    by: Annotated[sweeps.Measure, typer.Option(help="what the trials are compared by")] = sweeps.Measure.REWARD,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print trials, rungs and plan; start nothing")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="move a previous run aside and start a new one")] = False,
) -> None:
    """Train an adapter per combination of listed values in one run; half of them stop at each rung.

    At the end the winner is printed with the overrides to set. The same command resumes the sweep in its folder.
    """
    # os.path takes a text that is too long for a path as one that does not exist.
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    files = [*(word for word in words if word not in overrides), *map(str, config or [])]
    listed, chosen = sweeps.plan_sweep(files, overrides, rungs=rungs, by=by)
    out = Console(highlight=False)
    sweeps.print_plan(chosen, out)
    if not fresh and sweeps.has_ended(listed.run_folder):
        sweeps.record_sweep(listed.run_folder, chosen)
        sweeps.print_result(listed.run_folder, out)
        return
    if dry_run:
        flags = ["--by", by, *[f"--rungs={rungs}"] * bool(rungs), *["--fresh"] * fresh]
        print_dry_run(listed, ["sweep", *words, *_files(config or []), *flags], fresh=fresh)
    else:
        raise typer.Exit(start(listed, fresh=fresh, sweep=chosen))


def plan(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [a.b=c]...", help="run folder or its name; overrides")
    ] = None,
    config: OptionalFiles = None,
    details: Annotated[bool, typer.Option("--details", help="also all processes, ports and files")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="instead: speed, by running it in virtual time")] = False,
    gpus: Annotated[int | None, typer.Option(help="with --simulate: devices to split between both sides")] = None,
    like: Annotated[str | None, typer.Option(metavar="RUN", help="with --simulate: take seconds of a run")] = None,
) -> None:
    """Print the resolved plan of a start; starts and creates nothing (as `train --dry-run`)."""
    if not simulate and (gpus is not None or like is not None):
        raise ConfigError("--gpus, --like", "they belong to --simulate", "give --simulate, too")
    chosen = chosen_config(config or [], words or [])
    if simulate:
        runs = [word for word in words or [] if "=" not in word]
        print_simulation(chosen, gpus=gpus, like=like or next(iter(runs), None))
    else:
        command = ["train", *_files(config), *(words or [])] if config else ["resume", *(words or [])]
        print_dry_run(chosen, command, details=details)


def _files(config: Sequence[Path]) -> list[str]:
    return [word for file in config for word in ("--config", str(file))]


def print_simulation(config: Config, *, gpus: int | None, like: str | None) -> None:
    """Print figures of a simulated run of ``config``, with seconds by arithmetic or as the run ``like`` took them.

    Raises ConfigErrors for what cannot start.
    """
    # The controller and torch, which a plan does not need.
    from areal_lora.launcher.simulation import cost_model, simulate
    from areal_lora.obs.report.inspector import RolloutFilter, RolloutIndex

    err = Console(stderr=True, highlight=False)
    prepared = prepare(config, err, starts=False)
    costs, basis = cost_model.arithmetic(prepared.config, prepared.plan.shape), "by arithmetic; --like RUN measures"
    if like is not None:
        folder = find_run(like)
        of = prepare(with_overrides(folder, ()), err, starts=False)
        own = cost_model.arithmetic(of.config, of.plan.shape)
        answers = [head.answer for head in RolloutIndex(folder).page(RolloutFilter(outcome="trained")).rows]
        costs, basis = (
            cost_model.scaled(costs, read_metrics(folder), own, of.config, answers),
            f"as measured in {folder}",
        )
    hosts = Counter(server.node for server in prepared.plan.role(SERVER))
    report = simulate.SimulationReport.of(prepared.config, costs, host=max(hosts.values()), gpus=gpus)
    console = Console(highlight=False)
    console.print(f"[bold]{config.run.name}[/bold], simulated; seconds {basis}", soft_wrap=True)
    for table in simulate.tables(report):
        console.print(table)


def print_dry_run(config: Config, command: Sequence[str], *, fresh: bool = False, details: bool = False) -> None:
    """Print the resolved plan of ``config``, which ``command`` starts; start and create nothing.

    Raises ConfigErrors for what cannot start.
    """
    prepared = prepare(config, Console(stderr=True, highlight=False), fresh=fresh, starts=False)
    print_plan(prepared.config, prepared.plan, Console(highlight=False), full=details, command=["areal-lora", *command])


def chosen_config(files: list[Path], words: list[str]) -> Config:
    """The configuration of ``--config`` files or of a run folder, with the overrides among ``words``."""
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    runs = [word for word in words if word not in overrides]
    if files and runs and not os.path.exists(runs[0]):
        raise ConfigError(runs[0], "is not an override", "write it as dotted.key=value")
    if len(runs) > 1 or bool(runs) == bool(files):
        given = " ".join([*(f"--config {file}" for file in files), *runs]) or "nothing"
        raise ConfigError("RUN or --config", f"{given} was given", "name one run, or configuration files")
    return with_overrides(find_run(runs[0]), overrides) if runs else load_config(files, overrides)


def resume(run: Run, overrides: Overrides = None) -> None:
    """Start a run again from the newest checkpoints: here, or as a Slurm job.

    The checks are those of a start; a run that still works is not touched.
    """
    raise typer.Exit(start(with_overrides(find_run(run), overrides or [])))


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
    if run and config:
        raise ConfigError("--run", "--config was given, too", "name one of both")
    words = [*([run] if run else []), *(overrides or [])]
    nothing = not words and not config  # then one process of each role on this machine's CPUs
    chosen = canary_config(Path.cwd() / "runs") if nothing else chosen_config(config or [], words)
    started = time.monotonic()
    findings = examine(chosen, lambda line: print(line, file=sys.stderr, flush=True), quick=quick, keep=keep)
    failed = sum(finding.level is Level.FAIL for finding in findings)
    took_s = time.monotonic() - started
    by_adapter: dict[str, list[StepRecord]] = {}
    for step in read_metrics(find_run(run)).steps if run else ():
        by_adapter.setdefault(step.adapter, []).append(step)
    bills = {name: parts for name, steps in by_adapter.items() if (parts := bill(steps))}
    if as_json:
        text = {"findings": findings, "failed": failed, "seconds": round(took_s, 1), "mismatch": bills}
        sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    else:
        for finding in findings:
            print(finding)
        verdict = f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed"
        print(f"{verdict} in {took_s:.0f} s")
        for name, parts in bills.items():
            print(*bill_lines(name, parts), sep="\n")
    raise typer.Exit(ExitCode.MISSING if failed else ExitCode.DONE)


def add_servers(
    run: Run,
    servers: Annotated[int, typer.Option(help="servers to add; on Slurm, of each node")] = 1,
    nodes: Annotated[int, typer.Option(help="Slurm jobs of one node each")] = 1,
    time: Annotated[str, typer.Option(help="time limit of the Slurm jobs, instead of the run's")] = "",
    partition: Annotated[str, typer.Option(help="partition of the Slurm jobs, instead of the run's")] = "",
    grace_s: Annotated[float, typer.Option(help="seconds for requests in progress when a server leaves")] = 20.0,
    here: Annotated[bool, typer.Option("--here", help="on this machine, also for a run on Slurm")] = False,
) -> None:
    """Add rollout servers to a run in progress, as Slurm jobs of one node each, or on this machine.

    On this machine the command stays until the run ends; Ctrl-C lets the servers leave in order.
    """
    console, job = run_console(), SpareJob(servers, grace_s, time, partition)
    raise typer.Exit(spares.add_servers(find_run(run), job, nodes=nodes, here=here, console=console))


def remove_servers(
    run: Run, job: Annotated[str, typer.Option(help="only those of this Slurm job, or of this process")] = ""
) -> None:
    """Have added servers leave: they take no more requests, end those in progress, and the run continues."""
    spares.remove_servers(find_run(run), job=job, console=Console(highlight=False))
