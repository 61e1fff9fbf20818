"""The console script ``areal-lora``: the verbs are functions of this folder's modules.

A verb's module is imported when the verb runs or is completed: ``areal-lora --help`` imports none of them.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from areal_lora import __version__
from areal_lora.errors import ArealLoraError, ConfigErrors, EnvironmentError_, ExitCode, RecordError
from areal_lora.processes.log import printable

VERBS: dict[str, tuple[str, str]] = {
    "init": ("init.init", "Write a commented configuration for a model and a data set."),
    "train": ("train.train", "Start a run from configuration files."),
    "sweep": ("train.sweep", "Compare settings of an adapter in one run, by successive halving."),
    "status": ("status.status", "What a run does now, or how it ended."),
    "logs": ("logs.logs", "Last lines of the logs, or new ones (-f)."),
    "track": ("export.track", "Send a run to Weights & Biases or MLflow, until it ends."),
    "samples": ("logs.samples", "Answers of a step with rewards, drops and errors."),
    "conversations": ("logs.conversations", "Requests of the agents of a run, and the answers."),
    "stop": ("stop.stop", "Stop a run; it can be resumed."),
    "resume": ("train.resume", "Start a run again from its newest checkpoints."),
    "plan": ("train.plan", "What a start would do; starts nothing."),
    "add-servers": ("train.add_servers", "Add rollout servers to a run in progress."),
    "remove-servers": ("train.remove_servers", "Have added servers leave in order."),
    "restart-servers": ("stop.restart_servers", "Restart rollout servers in turn; the run continues."),
    "eval": ("evaluate.evaluate", "Evaluate a version of a run on its sets."),
    "chat": ("serve.chat", "Talk to a version of a run in the terminal."),
    "serve": ("serve.serve", "Serve a version behind an OpenAI endpoint on this machine."),
    "serve-remote": ("serve.serve_remote", "Serve on this machine in a run elsewhere, over HTTP."),
    "export": ("export.export", "Write a version as a PEFT folder."),
    "merge": ("export.merge", "Write base and adapter as one model folder."),
    "push": ("export.push", "Send a version's adapter to the hub."),
    "page": ("export.page", "A page in the browser that follows a run, or several."),
    "compare": ("evaluate.compare", "Where runs differ, in configuration and figures."),
    "schema": ("export.schema", "JSON schema of configuration files, for editors."),
    "report": ("export.report", "Write report.html now."),
    "doctor": ("train.doctor", "Whether this machine or allocation can run a configuration."),
    "adapters": ("adapters.app", "Adapters of a run with a service (--serve)."),
}
"""Module of this folder with the function, and the line of ``--help``, in its order."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"areal_lora {__version__}")
        raise typer.Exit(ExitCode.DONE)


class _Verbs(TyperGroup):
    """Imports a verb when it is resolved; before that it is its name and its line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            module, _, function = VERBS[name][0].partition(".")
            verb = getattr(import_module(f"areal_lora.cli.{module}"), function)
            app = verb if isinstance(verb, typer.Typer) else typer.Typer(add_completion=False, rich_markup_mode=None)
            if app is not verb:
                app.command(name)(verb)
            command = get_command(app)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Here a closed output is caught, as in `areal-lora logs RUN | head`: typer ends the process with 1 on one."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            output = select.poll()
            output.register(sys.stdout, 0)  # that no one reads it is reported without being named
            if not output.poll(0):
                reason = "a process or service closed its connection (fix: look into its log)"
                raise EnvironmentError_(f"{error.strerror}: {reason}") from error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.DONE
        return code


def build() -> typer.Typer:
    app = typer.Typer(
        name="areal-lora",
        cls=_Verbs,
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

    for name, (_, line) in VERBS.items():
        app.command(name, short_help=line)(_version)  # in its place: see `_Verbs`
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Every failure is one line on standard error; the exit codes are ``errors.ExitCode``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # the descriptor may have become a pipe since Python started
                stream.reconfigure(errors="backslashreplace")  # rows and answers hold what the encoding may lack
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
    except PermissionError as error:
        fix = "run the command as the user that owns the run, or change the mode"
        return _fail(f"{error.filename}: {error.strerror} (fix: {fix})", EnvironmentError_.exit_code)
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        return _fail(f"{error.filename}: {error.strerror} (fix: correct this path)", ExitCode.WRONG_INPUT)
    except OSError as error:
        fix = "make room on the disk, mount it for writing, or repair it"
        place = f"{error.filename}: " if error.filename else ""  # a write, other than an opening, has no name
        return _fail(f"{place}{error.strerror or error} (fix: {fix})", RecordError.exit_code)
    return code if isinstance(code, int) else ExitCode.DONE


def _fail(text: str, code: int) -> int:
    print(printable(f"error: {' '.join(text.split())}"), file=sys.stderr)
    return code
