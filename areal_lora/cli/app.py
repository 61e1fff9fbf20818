"""The console script ``areal-lora``: one module of this folder for each verb.

A verb's module imports at its top only what its options need; the rest is imported when the verb runs, so that
``areal-lora --help`` needs a third of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from areal_lora import __version__
from areal_lora.cli import adapters, doctor, evaluate, export, init, logs, samples, serve, status, stop, train
from areal_lora.errors import ArealLoraError, ConfigErrors, EnvironmentError_, ExitCode, RecordError

VERBS: dict[str, tuple[Callable[..., None], str]] = {
    "init": (init.init, "Write a commented configuration for a model and a data set."),
    "train": (train.train, "Start a run from configuration files."),
    "status": (status.status, "What a run does now, or how it ended."),
    "logs": (logs.logs, "Last lines of the logs, or new ones (-f)."),
    "track": (export.track, "Send a run to Weights & Biases or MLflow, until it ends."),
    "samples": (samples.samples, "Answers of a step with rewards, drops and errors."),
    "conversations": (samples.conversations, "Requests of the agents of a run, and the answers."),
    "stop": (stop.stop, "Stop a run; it can be resumed."),
    "resume": (train.resume, "Start a run again from its newest checkpoints."),
    "plan": (train.plan, "What a start would do; starts nothing."),
    "add-servers": (adapters.add_servers, "Add rollout servers to a run in progress."),
    "remove-servers": (adapters.remove_servers, "Have added servers leave in order."),
    "eval": (evaluate.evaluate, "Evaluate a version of a run on its sets."),
    "chat": (serve.chat, "Talk to a version of a run in the terminal."),
    "serve": (serve.serve, "Serve a version behind an OpenAI endpoint on this machine."),
    "export": (export.export, "Write a version as a PEFT folder."),
    "merge": (export.merge, "Write base and adapter as one model folder."),
    "push": (export.push, "Send a version's adapter to the hub."),
    "compare": (evaluate.compare, "Where two runs differ, in configuration and figures."),
    "schema": (export.schema, "JSON schema of configuration files, for editors."),
    "report": (export.report, "Write report.html now."),
    "doctor": (doctor.doctor, "Whether this machine or allocation can run a configuration."),
}
"""Function and line of ``--help``, in its order."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"areal_lora {__version__}")
        raise typer.Exit(ExitCode.DONE)


def build() -> typer.Typer:
    """Return the application with all verbs."""
    app = typer.Typer(
        name="areal-lora",
        help="Train LoRA adapters with reinforcement learning, and look after runs.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def together(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_version, help="print the version")
        ] = False,
    ) -> None:
        """Train LoRA adapters, and look after runs. RUN is a run folder, or the name of one below runs/."""

    for name, (verb, line) in VERBS.items():
        app.command(name, short_help=line)(verb)
    app.add_typer(adapters.app, name="adapters", short_help="Adapters of a run with a service (--serve).")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Every failure is one line on standard error; the exit codes are ``errors.ExitCode``."""
    try:
        # The name is part of what --show-completion prints, and `python -m areal_lora` is no name of a shell function.
        code = build()(
            args=None if arguments is None else list(arguments), prog_name="areal-lora", standalone_mode=False
        )
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except typer.TyperException as wrong:
        return _fail(f"{' '.join(wrong.format_message().split())} (see --help)", ExitCode.WRONG_INPUT)
    except ConfigErrors as refused:
        for error in refused.errors:
            _fail(str(error), refused.exit_code)
        return refused.exit_code
    except ArealLoraError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:  # `areal-lora logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except PermissionError as error:
        fix = "run the command as the user that owns the run, or change the mode"
        return _fail(f"{error.filename}: {error.strerror} (fix: {fix})", EnvironmentError_.exit_code)
    except OSError as error:
        fix = "make room on the disk, mount it for writing, or repair it"
        place = f"{error.filename}: " if error.filename else ""  # a write, other than an opening, has no name
        return _fail(f"{place}{error.strerror or error} (fix: {fix})", RecordError.exit_code)
    return code if isinstance(code, int) else ExitCode.DONE


def _fail(text: str, code: int) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return code
