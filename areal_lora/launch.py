"""Start a run: ``python -m areal_lora.launch --config X.yaml [--config overlay.yaml] [a.b=c ...] [--dry-run]``.

With ``--serve`` the run takes adapters over HTTP and from its inbox while it works (`areal_lora.service`).

The same command with the same run folder resumes the run in it. Exit codes: `errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ArealLoraError, ConfigError, ConfigErrors, ExitCode
from areal_lora.launcher.dry_run import print_plan
from areal_lora.launcher.explain import explain_resume
from areal_lora.launcher.run import prepare, run, say


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        parts: list[Path | Mapping[str, Any]] = [{"service": {"api": {}}}] if arguments.serve else []
        config = load_config([*parts, *arguments.config], arguments.overrides)
        if not (arguments.dry_run or arguments.explain_resume):
            return run(config, fresh=arguments.fresh)
        if arguments.dry_run:
            dry_run(config, fresh=arguments.fresh, details=arguments.details)
        else:
            for line in explain_resume(prepare(config, err, fresh=arguments.fresh, starts=False).config):
                say(out, line)
        return ExitCode.DONE
    except ConfigErrors as refused:
        for error in refused.errors:
            say(err, f"error: {error}")
        return refused.exit_code
    except ArealLoraError as error:
        say(err, f"error: {error}")
        return error.exit_code


def dry_run(config: Config, *, fresh: bool = False, details: bool = False) -> None:
    """Print the resolved plan of ``config``; start and create nothing. Raises like ``prepare``."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    prepared = prepare(config, err, fresh=fresh, starts=False)
    print_plan(prepared.config, prepared.plan, out, full=details)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m areal_lora.launch", description="Train LoRA adapters with reinforcement learning.")
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="YAML file or the name of a shipped example; several are merged in order",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
    parser.add_argument("--details", action="store_true", help="with --dry-run: also all processes, ports and files")
    parser.add_argument(
        "--explain-resume",
        action="store_true",
        help="print what a start would restore, re-issue and drop; start nothing",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="move the folder of a previous run aside and begin a new run"
    )
    parser.add_argument(
        "--serve", action="store_true", help="take adapters while the run works, over HTTP and from its inbox"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override one key, such as run.seed=2")
    return parser.parse_intermixed_args(argv)


class Parser(argparse.ArgumentParser):
    """argparse with this program's exit code for wrong input."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(ConfigError.exit_code, f"error: {message} (see --help)\n")


if __name__ == "__main__":
    sys.exit(main())
