"""``areal_lora.train``: a run from Python, with rewards and workflows as objects."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, ExitCode, RunFailed, RunInterrupted
from areal_lora.launcher.run import prepare, start
from areal_lora.launcher.supervise import Interrupts
from areal_lora.library.objects import AGENT, ENVIRONMENT, REWARD, WORKFLOW, given_sections, user_code
from areal_lora.library.runs import Run, load_run

Part = Path | str | Mapping[str, Any]


def train(
    config: Config | Part | Sequence[Part],
    *,
    overrides: Sequence[str] = (),
    reward: Callable[..., Any] | None = None,
    environment: Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
    workflow: Callable[..., Any] | None = None,
    fresh: bool = False,
) -> Run:
    """Train on this machine until the last step; resume the run in its folder unless ``fresh`` moves it aside.

    ``config`` is a file, a mapping of the same shape, several of them to merge in order, or a Config. ``reward`` is a
    reward function, ``environment`` a class or factory for `multi_turn`, ``agent`` an agent's function and
    ``workflow`` a workflow's factory; each takes the place of the configured one. Call it in the main thread.

    Raises ConfigError or ConfigErrors for what cannot start, RunInterrupted after Ctrl-C, RunFailed for a run that
    ended before its last step. No process remains in any case, and the handlers of signals are those from before.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train", "it handles signals, which only the main thread can", "call it in the main thread")
    objects = {REWARD: reward, ENVIRONMENT: environment, AGENT: agent, WORKFLOW: workflow}
    wanted = _config(config, overrides, objects)
    if wanted.cluster.kind != "local":
        fix = "submit it with areal-lora train, then load_run its folder"
        raise ConfigError("cluster.kind", f"train waits for runs of this machine, not for {wanted.cluster.kind}", fix)
    code = user_code(wanted, objects)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with TemporaryDirectory(prefix="areal-lora-") as staged:
        code.write(Path(staged))
        prepared = prepare(code.put_into(wanted, Path(staged)), err, fresh=fresh)
    folder = prepared.plan.run_folder
    with _handlers_kept():
        final = code.put_into(prepared.config, folder.code)
        end = start(final, prepared.plan, out, fresh, prepared.download, code.files)
    if end.code == ExitCode.INTERRUPTED:
        raise RunInterrupted(folder.path, end.code, end.why)
    if end.code != ExitCode.DONE:
        raise RunFailed(folder.path, end.code, end.why)
    return load_run(folder.path)


def _config(config: Config | Part | Sequence[Part], overrides: Sequence[str], objects: Mapping[str, object]) -> Config:
    if isinstance(config, Config):
        return load_config([config.model_dump(mode="json")], overrides) if overrides else config
    parts = [config] if isinstance(config, Path | str | Mapping) else config
    return load_config(parts, overrides, given=given_sections(objects))


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers: after an interrupted run the launcher ignores signals, as its process is ending."""
    before = {number: signal.getsignal(number) for number in Interrupts.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
