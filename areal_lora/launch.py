"""Start a run: ``python -m areal_lora.launch --config X.yaml [--config overlay.yaml] [a.b=c ...] [--dry-run]``.

The same command with the same run folder goes on where an earlier run ended. Exit codes: `errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from areal_lora.checkpoint.recover import check_present
from areal_lora.config.facts import Facts, gather_facts
from areal_lora.config.guardrails import Severity, check, resolve_targets
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ArealLoraError, ConfigError, ExitCode
from areal_lora.launcher.dry_run import print_plan
from areal_lora.launcher.explain import explain_resume
from areal_lora.launcher.hub import Download, download, resolve
from areal_lora.launcher.local import run_local
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm import submit
from areal_lora.launcher.start import PreviousRun, RunStart, recorded_model
from areal_lora.obs.report.summary import print_closing


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        config = load_config(arguments.config, arguments.overrides)
        starts = not (arguments.dry_run or arguments.explain_resume)
        here = starts and config.cluster.kind == "local"
        resolved = resolve(config, lambda: None if arguments.fresh else recorded_model(config), online=starts)
        config = resolved.config
        facts = gather_facts(config, runs_here=here)
        if not report_findings(config, facts, err):
            return ConfigError.exit_code
        config = resolve_targets(config, facts)
        plan = make_plan(config, facts)
        if arguments.dry_run:
            print_plan(config, plan, out)
            return ExitCode.DONE
        if arguments.explain_resume:
            for line in explain_resume(config):
                say(out, line)
            return ExitCode.DONE
        return start(config, plan, out, arguments.fresh, resolved.download)
    except ArealLoraError as error:
        say(err, f"error: {error}")
        return error.exit_code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m areal_lora.launch", description="Train LoRA adapters with reinforcement learning.")
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="YAML file; give several to merge them in order",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
    parser.add_argument(
        "--explain-resume",
        action="store_true",
        help="say what a start would restore, issue again and drop, and start nothing",
    )
    parser.add_argument("--fresh", action="store_true", help="move an earlier run's folder aside and begin anew")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override one key, such as run.seed=2")
    return parser.parse_intermixed_args(argv)


class Parser(argparse.ArgumentParser):
    """argparse with this program's exit code for wrong input."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(ConfigError.exit_code, f"error: {message} (see --help)\n")


def report_findings(config: Config, facts: Facts, err: Console) -> bool:
    """Print each error on a line of its own, or the warnings where there is none; False where there is an error."""
    findings = check(config, facts)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    for finding in errors or findings:
        say(err, f"{finding.severity}: {finding.error()}")
    return not errors


def start(config: Config, plan: JobPlan, out: Console, fresh: bool = False, needed: Download | None = None) -> int:
    """Make or take up the run folder, download what of the model is ``needed``, run here or submit to Slurm."""
    with RunStart(config, fresh) as folder:
        if folder.moved is not None:
            say(out, f"A previous run was in {plan.run_folder}; it is now {folder.moved.name}.")
        if folder.previous is not None and folder.previous.finished(config):
            return say_finished(folder.previous, plan, out)
        say(out, f"Run folder: {plan.run_folder}")
        if folder.previous is not None:
            check_present(plan.run_folder, config)
            say(out, going_on(folder.previous))
        if config.model.commit is not None:
            say(out, f"Base model: {config.model.path} at {config.model.commit}, in {config.model.snapshot}")
        if needed is not None:
            download(needed, partial(say, out))
        if config.cluster.kind == "slurm":
            say(out, f"Submitted Slurm job {submit(config, plan, folder)}; logs in {plan.run_folder.logs}")
            return ExitCode.DONE
        folder.prepare()
        code = run_local(config, plan, out)
    if code == ExitCode.DONE:
        print_closing(plan.run_folder, out)
    return code


def going_on(previous: PreviousRun) -> str:
    """What the run that is in the folder already goes on from, in words."""
    newest = [f"{name}@v{max(versions)}" for name, versions in previous.versions.items() if versions]
    if not newest:
        return "A run in it ended before its first checkpoint: it begins again at step 0."
    return f"The run in it goes on; its newest checkpoints: {', '.join(newest)}."


def say_finished(previous: PreviousRun, plan: JobPlan, out: Console) -> int:
    """A run without anything left to do is a success, shown again."""
    more = f"more steps, such as run.steps={2 * previous.steps_done}"
    say(out, f"This run is done: {previous.steps_done} steps. Go on with {more}, or start over with --fresh.")
    print_closing(plan.run_folder, out)
    return ExitCode.DONE


def say(console: Console, text: str) -> None:
    """One line, however long, with nothing in it taken for markup."""
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
