"""From ``model.path`` to a folder: a hub name becomes a commit and the folder of its snapshot.

`resolve` decides, with the hub's cache and, where the run is to start, with the hub; `download` then brings the
files that are missing. The commit is recorded in the run's config.json, and a run that is resumed keeps it.
"""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from areal_lora.config.models import Config, ModelConfig
from areal_lora.config.recorded import cached_snapshot, missing_files, wanted
from areal_lora.errors import ArealLoraError, ConfigError, EnvironmentError_, ExitCode
from areal_lora.families.registry import is_hub_name
from areal_lora.launcher.supervise import handled
from areal_lora.obs.console import duration, human_bytes

ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDownload:
    """Files of one commit of a hub model that are not in ``folder``, its snapshot in the cache, yet."""

    name: str
    folder: Path
    files: tuple[str, ...]
    nbytes: int


def resolve(config: Config, earlier: ModelConfig | None, *, online: bool) -> tuple[Config, HubDownload | None]:
    """``config`` with the model's folder known as far as it can be, and what has to be downloaded before a start.

    ``earlier`` is the model of the run that is resumed, if there is one. Offline (``--dry-run``) nothing is
    requested: a hub name without a snapshot in the cache stays without a folder. Raises ConfigError for what is neither
    a folder nor a hub model, and EnvironmentError_ where the hub would have to be contacted and cannot be.
    """
    model = config.model.model_copy(update={"commit": None, "snapshot": None})
    if Path(model.path).is_dir():
        if model.revision is not None:
            raise ConfigError("model.revision", f"{model.path} is a folder, which has no revisions", "leave it out")
        return config.model_copy(update={"model": model}), None
    if not is_hub_name(model.path):
        reason = f"there is no folder {model.path!r}, and it is not a hub name"
        raise ConfigError("model.path", reason, "give a Hugging Face model folder, or a hub name org/name")
    revision = model.revision
    if earlier is not None and earlier.commit and (earlier.path, earlier.revision) == (model.path, model.revision):
        revision = earlier.commit
    folder = _look_up(model, revision) if online else cached_snapshot(model.path, revision)
    if folder is None:
        return config.model_copy(update={"model": model}), None
    model = model.model_copy(update={"commit": folder.name, "snapshot": str(folder)})
    needed = _plan(model.path, folder) if online and missing_files(folder) else None
    return config.model_copy(update={"model": model}), needed


def _look_up(model: ModelConfig, revision: str | None) -> Path:
    """The snapshot folder of ``revision``; a complete one in the cache counts where the hub gives no access."""
    cached = cached_snapshot(model.path, revision)
    try:
        with _hub(model.path, revision, "config.json"), _quiet():
            if cached is None:  # a download of what is not cached retries for 20 s before it reports an error
                HfApi().model_info(model.path, revision=revision, timeout=ANSWER_S)
            return Path(hf_hub_download(model.path, "config.json", revision=revision)).absolute().parent
    except ArealLoraError:
        if cached is None or missing_files(cached):
            raise
        return cached


def _plan(name: str, folder: Path) -> HubDownload:
    with _hub(name, folder.name, ", ".join(missing_files(folder))):
        info = HfApi().model_info(name, revision=folder.name, files_metadata=True, timeout=ANSWER_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = tuple(file for file in wanted(sizes) if not (folder / file).is_file())
    if not any(file.endswith(".safetensors") for file in wanted(sizes)):
        reason = f"{name} has no model.safetensors and no shards of it"
        raise ConfigError("model.path", reason, "use one that is saved as safetensors")
    return HubDownload(name=name, folder=folder, files=files, nbytes=sum(sizes[file] for file in files))


def download(plan: HubDownload, report: Callable[[str], None]) -> None:
    """Bring the files of ``plan`` into the cache. What an earlier download left half-written is taken up again.

    Ctrl-C ends the process. Raises EnvironmentError_ if not all of them are available.
    """
    report(
        f"Downloading {plan.name} ({len(plan.files)} files, {human_bytes(plan.nbytes)}) from {constants.ENDPOINT} "
        f"into {plan.folder}"
    )
    started_s, quiet = time.monotonic(), nullcontext() if sys.stderr.isatty() else _quiet()
    ctrl_c = handled(signal.SIGINT, _end_at_once)
    with _hub(plan.name, plan.folder.name, ", ".join(plan.files)), ctrl_c, quiet:
        snapshot_download(plan.name, revision=plan.folder.name, allow_patterns=list(plan.files))
    if lacks := missing_files(plan.folder):
        raise EnvironmentError_(f"model.path: {plan.name} as downloaded lacks {', '.join(lacks)} ({plan.folder})")
    report(f"Downloaded {human_bytes(plan.nbytes)} in {duration(time.monotonic() - started_s)}.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's progress bars: in a log file they are thousands of lines."""
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _end_at_once(number: int, frame: object) -> None:
    """End the process: the threads that download cannot be interrupted, and exiting waits for them."""
    print("Interrupted; the same command downloads the rest.", flush=True)
    os._exit(ExitCode.INTERRUPTED)


@contextmanager
def _hub(name: str, revision: str | None, what: str) -> Iterator[None]:
    """Translate what huggingface_hub raises into one line with the fix."""
    own = Path(sys.executable).with_name("hf")  # as a shell finds it without an activated environment
    program = shlex.quote(str(own)) if own.is_file() else "hf"
    hub, access = constants.ENDPOINT, f"run `{program} auth login` or set HF_TOKEN"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error repeats what its warnings state
    try:
        yield
    except errors.GatedRepoError as error:
        reason = f"{name} is gated, and {hub} gives this machine no access"
        raise ConfigError("model.path", reason, f"accept its terms at {hub}/{name}, then {access}") from error
    except errors.RepositoryNotFoundError as error:
        reason = f"there is no folder {name!r}, and {hub} has no model of this name that this machine may read"
        raise ConfigError("model.path", reason, f"correct the name; if the model is private, {access}") from error
    except errors.RevisionNotFoundError as error:
        reason = f"{name} has no revision {revision!r} on {hub}"
        raise ConfigError("model.revision", reason, "give a branch, a tag or a commit of it") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, revision, what, _line(error.__cause__ or error)) from error
    except errors.EntryNotFoundError as error:
        raise ConfigError("model.path", f"{name} has no {what} on {hub}", "use a model for transformers") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError("model.path", f"{hub} refuses access to {name}: {_line(error)}", access) from error
        raise _unreachable(name, revision, what, _line(error)) from error
    except ArealLoraError:
        raise
    except Exception as error:  # fault boundary: the hub's client raises its transport's many types, and OSError
        raise _unreachable(name, revision, what, _line(error)) from error


def _unreachable(name: str, revision: str | None, what: str, why: str) -> EnvironmentError_:
    at = f" at revision {revision}" if revision else ""
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return EnvironmentError_(
        f"model.path: there is no folder {name!r}, the cache {constants.HF_HUB_CACHE} lacks files of the hub model "
        f"{name}{at} ({what}), and {constants.ENDPOINT} did not give them{offline}: {why} "
        f"(fix: start where a hub is reachable, copy the cache of a machine that has it, or give a model folder)"
    )


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
