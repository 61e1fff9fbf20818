"""Start a run: ``python -m areal_lora.launch --config X.yaml [--config overlay.yaml] [a.b=c ...] [--dry-run]``.

Exit codes: 0 done, 64 wrong input (nothing was started), 69 something is missing on this
machine, 70 a component failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from areal_lora.config.facts import Facts, gather_facts
from areal_lora.config.guardrails import Severity, check, resolve_targets
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rendezvous import create_secret
from areal_lora.errors import ArealLoraError, ConfigError
from areal_lora.launcher.dry_run import print_plan
from areal_lora.launcher.local import EXIT_OK, run_local
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm import submit


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        config = load_config(arguments.config, arguments.overrides)
        here = not arguments.dry_run and config.cluster.kind == "local"
        facts = gather_facts(config, runs_here=here)
        if not report_findings(config, facts, err):
            return ConfigError.exit_code
        config = resolve_targets(config, facts)
        plan = make_plan(config, facts)
        if arguments.dry_run:
            print_plan(config, plan, out)
            return EXIT_OK
        return start(config, plan, out)
    except ArealLoraError as error:
        say(err, f"error: {error}")
        return error.exit_code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m areal_lora.launch", description="Train LoRA adapters with reinforcement learning.")
    parser.add_argument(
        "--config", action="append", required=True, type=Path, metavar="FILE",
        help="YAML file; give several to merge them in order",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
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


def start(config: Config, plan: JobPlan, out: Console) -> int:
    """Make the run folder, then run here or submit to Slurm."""
    with RunFolder(config) as moved:
        if moved is not None:
            say(out, f"A previous run was in {plan.run_folder}; it is now {moved.name}.")
        say(out, f"Run folder: {plan.run_folder}")
        if config.cluster.kind == "slurm":
            say(out, f"Submitted Slurm job {submit(config, plan)}; logs in {plan.run_folder / 'logs'}")
            return EXIT_OK
        code = run_local(config, plan, out)
    if code == EXIT_OK:
        # Late: only a finished run needs it.
        from areal_lora.obs.summary import print_closing

        print_closing(plan.run_folder, out)
    return code


class RunFolder:
    """The new run folder, held while the launcher lives; entering gives where an older one was moved, or None.

    Raises ConfigError where a launcher is using the folder or it holds something else.
    """

    def __init__(self, config: Config) -> None:
        root = config.run.root.absolute()
        self._config = config.model_copy(update={"run": config.run.model_copy(update={"root": root})})
        self._folder = self._config.run_folder
        self._lock = -1

    def __enter__(self) -> Path | None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder.parent / f".{self._folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                "run.name", f"a run in {self._folder} is still going", "wait for it, or set another run.name"
            ) from None
        moved = move_aside(self._folder)
        self._folder.mkdir(exist_ok=True)
        for name in ("rendezvous", "logs", "status"):
            (self._folder / name).mkdir()
        (self._folder / "config.json").write_text(self._config.model_dump_json(indent=2), encoding="utf-8")
        create_secret(self._folder)
        return moved

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._lock)


def move_aside(folder: Path) -> Path | None:
    """Rename an earlier run's folder to the first free ``<name>.N``; None where there was none."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / "config.json").is_file():
        raise ConfigError("run.name", f"{folder} exists and is not a run folder", "set another run.name or run.root")
    n = 1
    while (target := folder.with_name(f"{folder.name}.{n}")).exists():
        n += 1
    folder.rename(target)
    return target


def say(console: Console, text: str) -> None:
    """One line, however long, with nothing in it taken for markup."""
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
