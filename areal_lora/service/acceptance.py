"""Whether the run can train an adapter: the checks of a start, for one more entry of ``adapters``.

A tenant's adapter may name nothing that is code, a file or an address, unless the operator offers it: a reward, a
workflow or a filter by path, and the tests of the reward ``code``, run as the user of the run, and a file is read as
that user. So a tenant may use the other built-in tasks and rewards, what the section ``service.api`` of the base
configuration lists, and files of its own folder. Numbers that would make the run work without end are bounded by its
quota.

The operator may also put adapters into the run folder: ``RUN/inbox/NAME.yaml``, each an entry of ``adapters``.

    NAME.yaml --accepted--> accepted/NAME.yaml
              --refused---> NAME.yaml.error beside it; a changed file is tried again

A file is read when it has not changed between two looks, so it may also be written in place. Its idempotency key is
the file itself: a crash between acceptance and the move creates nothing twice.
"""

import asyncio
import hashlib
import os
import re
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.facts import named_code
from areal_lora.config.load import load_config, read_source
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import joined, own_path
from areal_lora.config.sections import task as sections
from areal_lora.config.sections.run import CODE_REWARD, ApiConfig
from areal_lora.errors import ArealLoraError, ConfigError, ConfigErrors, RequestError, Unavailable
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import DesiredAdapter, write_file
from areal_lora.service.download import FILES
from areal_lora.service.http import fingerprint
from areal_lora.service.queue.client_sessions import AdapterRequest, answered, check_name, create, operate
from areal_lora.service.queue.queue_rows import LOCAL, AdapterRow, Key, Quota, Tables, Verb, digest_of, new_key
from areal_lora.service.queue.queue_store import Store, Transaction, put_key, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.queue.requests import Lora
from areal_lora.tasks.check import joining

log = get_logger(__name__)

SHARED = "shared"  # the folder below ``service.api.data`` whose files every tenant may name
CHECKS = 2  # adapters whose rows are read at a time
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,128}")
MAX_NAMES, MAX_LENGTH = 64, 256


def allowed(adapter: AdapterConfig, offered: ApiConfig, quota: Quota, tenant: str) -> AdapterConfig:
    """``adapter`` with the whole paths of the tenant's files. Raises RequestError for what it may not name."""
    for refused in (*_code(adapter, offered), *_served(adapter, offered), *_sizes(adapter, quota)):
        raise refused
    evals = list(adapter.evals)
    for i, each in enumerate(evals):
        if each.task is not None:
            task = _task(each.task, f"evals.{i}.task", offered, quota, tenant)
            evals[i] = each.model_copy(update={"task": task})
    changes: dict[str, object] = {"task": _task(adapter.task, "task", offered, quota, tenant), "evals": evals}
    if adapter.init_from is not None:
        changes["init_from"] = str(_file(adapter.init_from, "init_from", offered, tenant, FILES))
    return adapter.model_copy(update={key: value for key, value in changes.items() if value != getattr(adapter, key)})


def _code(adapter: AdapterConfig, offered: ApiConfig) -> Iterator[RequestError]:
    """User code that the operator does not offer; the tests of the reward ``code`` are programs in tenants' rows."""
    rewards = sections.reward_keys("", adapter.reward)
    named = [*named_code(adapter)]
    named += [(f"{key}.kind", CODE_REWARD) for key, reward in rewards if isinstance(reward, sections.CodeReward)]
    tasks = [("task", adapter.task), *((f"evals.{i}.task", each.task) for i, each in enumerate(adapter.evals))]
    filtered = [(key, task.keep) for key, task in tasks if isinstance(task, sections.DatasetTask)]
    named += [(f"{key}.keep", keep) for key, keep in filtered if keep is not None]
    for key, text in named:
        if text not in offered.code:
            choices = ", ".join(offered.code) or "none"
            fix = f"use a built-in one, or what the operator offers ({choices})"
            yield RequestError(key, "user code runs as the user of the run, and this code is not offered", fix)


def _served(adapter: AdapterConfig, offered: ApiConfig) -> Iterator[RequestError]:
    """Addresses that scorers and teachers would request, and keys that they would send there."""
    for key, model in adapter.served_models():
        if model.url not in offered.judges:
            choices = ", ".join(offered.judges) or "none"
            yield RequestError(f"{key}.url", "this model is not offered", f"use one that is: {choices}")
        elif model.key_env is not None and model.key_env != offered.judges[model.url]:
            fix = "leave it out, or use the variable that the operator offers for this model"
            yield RequestError(f"{key}.key_env", "this variable is not offered for the model", fix)


def _sizes(adapter: AdapterConfig, quota: Quota) -> Iterator[RequestError]:
    rewards, workflow = sections.reward_keys("", adapter.reward), adapter.workflow
    for key, found, most in (
        ("reward", sum(reward.workers for _, reward in rewards), quota.workers),
        ("workflow", workflow.workers if isinstance(workflow, sections.WorkerWorkflowConfig) else 0, quota.workers),
        ("sampling", adapter.sampling.prompts_per_step * adapter.sampling.n_samples, quota.sequences),
        ("evals", max((each.n_samples for each in adapter.evals), default=0), quota.sequences),
    ):
        if found > most:
            yield RequestError(key, f"{found} is above the quota of {most}", f"use at most {most}")
    for key, names in (
        ("target_modules", adapter.target_modules),
        ("exclude_modules", adapter.exclude_modules),
        ("rank_pattern", list(adapter.rank_pattern)),
        ("alpha_pattern", list(adapter.alpha_pattern)),
        ("evals", [each.name for each in adapter.evals]),
    ):
        if len(names) > MAX_NAMES or any(len(name) > MAX_LENGTH for name in names):
            reason = f"more than {MAX_NAMES} entries, or one longer than {MAX_LENGTH} characters"
            yield RequestError(key, reason, "use fewer and shorter ones")
    for key, patterns in (("rank_pattern", adapter.rank_pattern), ("alpha_pattern", adapter.alpha_pattern)):
        if wrong := next((pattern for pattern in patterns if not _PLAIN.fullmatch(pattern)), None):
            reason = f"{wrong[:64]!r} is more than a plain name, and expressions can take hours to compare"
            yield RequestError(key, reason, "name modules by letters, digits, _ and .")


def _task(task: sections.TaskConfig, key: str, offered: ApiConfig, quota: Quota, tenant: str) -> sections.TaskConfig:
    """``task`` with whole paths. Raises RequestError for another's file, and a hub data set that is not offered."""
    if isinstance(task, sections.WordProblemsTask):
        if max(task.n_train, task.n_eval) > quota.problems:
            raise RequestError(key, f"more than {quota.problems} generated problems", f"use at most {quota.problems}")
        return task
    named = {"train": task.train, "eval": task.eval}
    if key != "task":
        del named["train"]  # not read
    changes: dict[str, str] = {}
    for name, text in named.items():
        if text is None or (text in offered.data_sets and not Path(text).exists()):
            continue
        changes[name] = str(_file(text, f"{key}.{name}", offered, tenant))
    return task.model_copy(update={name: text for name, text in changes.items() if text != named[name]})


def _file(text: str, key: str, offered: ApiConfig, tenant: str, parts: tuple[str, ...] = ()) -> Path:
    """The whole path of a file that ``tenant`` may name, with no link to anywhere else; or of a folder of ``parts``.

    Without ``parts`` only the operator's folders are allowed: the library that reads one follows its links, and paths
    and addresses in its README.md.
    """
    fix = f"name a file of your folder, or one of {', '.join([f'{SHARED}/...', *offered.data_sets])}"
    refused = RequestError(key, f"{text[:MAX_LENGTH]!r} is neither one of your files nor an offered data set", fix)
    if offered.data is None or "\0" in text or not text.strip():
        raise refused
    try:
        folders = [(offered.data / name).resolve() for name in (tenant, SHARED)]
        for start in (folders[0], offered.data.resolve()):
            path = (start / text).resolve()
            if not path.exists() or not (parts or path.is_file() or path.is_relative_to(folders[1])):
                continue
            read = [path, *((path / part).resolve() for part in parts)]
            if all(any(each != folder and each.is_relative_to(folder) for folder in folders) for each in read):
                return path
    except (OSError, RuntimeError, ValueError):  # a name that is too long, links in a circle
        raise refused from None
    raise refused


class Acceptance:
    """Checks adapters against the configuration of the run, and has the ``writer`` create them.

    Checks block: they read the task's rows.
    """

    def __init__(self, config: Config, writer: Writer) -> None:
        self._config, self._offered, self._writer = config, api_of(config), writer
        self._heavy = asyncio.Semaphore(CHECKS)

    async def take_in(self, section: dict[str, Any], tenant: str, request: str, quota: Quota | None) -> bytes:
        """Check and create an adapter. Without ``quota`` it is the operator's own, caller may name any code and file.

        A repeated request is not checked again: its answer is the first one. Raises RequestError.
        """
        mark = fingerprint(Verb.CREATE, msgspec.json.encode(section, order="sorted"))
        if request:
            known, _ = await self._writer.change(lambda tx: answered(tx, tenant, request, mark))
            if known is not None:
                return known
        workflow = section.get("workflow")
        if isinstance(workflow, Mapping) and workflow.get("kind") == "client":
            fix = "make a model with the SDK, or leave it out"
            raise RequestError("workflow.kind", "only models of SDK clients have it", fix)
        async with self._heavy:
            if quota is None:
                adapter = await asyncio.to_thread(self.of_operator, section)
            else:
                adapter = await asyncio.to_thread(self.of_tenant, section, tenant, quota)

        def decide(tables: Tables) -> AdapterRow:
            return create(tables, tenant, adapter, now_s=time.time())

        answer, _ = await self._writer.change(lambda tx: operate(tx, tenant, Verb.CREATE, decide, request, mark))
        return answer

    def of_client(self, name: str, tenant: str, lora: Lora, quota: Quota) -> AdapterRequest:
        """The adapter of an SDK client's model, or one that serves a saved state of it. Raises RequestError."""
        section: dict[str, Any] = {"name": name, "workflow": {"kind": "client"}, **msgspec.to_builtins(lora)}
        return self.of_tenant({key: value for key, value in section.items() if value is not None}, tenant, quota)

    def of_tenant(self, section: Mapping[str, Any], tenant: str, quota: Quota) -> AdapterRequest:
        """A section that came over HTTP: code and files must be offered, relative paths are those of the tenant's.

        Raises RequestError with a key of the section.
        """
        name = _name(section)
        settings = {key: value for key, value in section.items() if key != "name"}
        try:
            adapter = joined(self._config, DesiredAdapter(name=name, incarnation=1, adapter=settings))
        except ConfigError as error:
            reason = error.reason.replace(f" in the settings of {name}.1", "")
            raise RequestError(error.path, reason, error.fix) from None
        except RecursionError:
            raise RequestError("adapter", "it is nested too deeply", "flatten it") from None
        named = adapter.model_copy(update={"name": name})
        return self._checked(allowed(named, self._offered, quota, tenant), name)

    def of_operator(self, section: Mapping[str, Any]) -> AdapterRequest:
        """A section of the operator's own, caller may name any code and file. Raises RequestError."""
        name = _name(section)
        base = self._config.model_dump(mode="json") | {"adapters": []}
        with _as_request_errors():
            (adapter,) = load_config([base, {"adapters": [dict(section)]}]).adapters  # paths from the working folder
        return self._checked(adapter, name)

    def _checked(self, adapter: AdapterConfig, name: str) -> AdapterRequest:
        with _as_request_errors():
            resolved = joining(self._config, adapter, online=False)
        settings = resolved.model_dump(mode="json", exclude={"name"}, exclude_unset=True)
        return AdapterRequest(name=name, rank=resolved.spec("").max_rank, weight=resolved.weight, settings=settings)


@contextmanager
def _as_request_errors() -> Iterator[None]:
    """Raise the first error about the only entry of ``adapters`` as a RequestError with a key of the entry."""
    try:
        yield
    except (ConfigError, ConfigErrors) as error:
        first = own_path(error if isinstance(error, ConfigError) else error.errors[0])
        raise RequestError(first.path, first.reason, first.fix) from None
    except ArealLoraError as error:
        raise RequestError("task", str(error), "turn to the operator of the run") from None


def api_of(config: Config) -> ApiConfig:
    """The section of the API. Raises ConfigError for a run without one."""
    if config.service is None or config.service.api is None:
        raise ConfigError("service.api", "the run has no such section", "start it with --serve")
    return config.service.api


def _name(section: Mapping[str, Any]) -> str:
    name = section.get("name")
    if not isinstance(name, str):
        raise RequestError("name", "the adapter has no name", "add name: NAME")
    check_name(name)
    return name


EVERY_S = 0.5
SUFFIXES = (".yaml", ".yml")
ACCEPTED, ERROR = "accepted", ".error"
MAX_BYTES = 1 << 20

Mark = tuple[int, int, int]
"""Inode, time of change and size of a file: equal while nothing changes it."""
TakeIn = Callable[[dict[str, Any], str], Awaitable[object]]


class FolderInbox:
    """One folder, mode 0700. ``take_in`` gets the section and the idempotency key, and raises RequestError."""

    def __init__(self, folder: Path, take_in: TakeIn) -> None:
        self._folder, self._take_in = folder, take_in
        self._seen: dict[str, Mark] = {}
        self._refused: dict[str, Mark] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / ACCEPTED).mkdir(mode=0o700, exist_ok=True)

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Take in what has not changed since the last look."""
        now = dict(self._files())
        for name, mark in sorted(now.items()):
            if self._seen.get(name) == mark and self._refused.get(name) != mark:
                await self._try(self._folder / name, mark)
        self._seen = now
        self._refused = {name: mark for name, mark in self._refused.items() if name in now}

    def _files(self) -> Iterator[tuple[str, Mark]]:
        for entry in os.scandir(self._folder):
            if not entry.name.endswith(SUFFIXES) or entry.name.startswith("."):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield entry.name, (found.st_ino, found.st_mtime_ns, found.st_size)

    async def _try(self, path: Path, mark: Mark) -> None:
        error = path.with_name(path.name + ERROR)
        try:
            if mark[2] > MAX_BYTES:
                reason = f"it is longer than {MAX_BYTES} bytes"
                raise RequestError(path.name, reason, "an adapter's section is short", status=413)
            section = read_source(path)
            sign = hashlib.sha256(repr((path.name, mark)).encode()).hexdigest()
            await self._take_in(section, f"inbox {sign}")
        except Unavailable as unavailable:
            log.warning("%s is read again later: %s", path, unavailable)
            return
        except (RequestError, ConfigError, UnicodeError, TypeError, RecursionError) as refused:
            # The last three: what no JSON holds.
            self._refused[path.name] = mark
            log.warning("%s is refused: %s", path, refused)
            write_file(error, f"{refused}\n")
            return
        reached("service.inbox_taken")
        with suppress(FileNotFoundError):  # it was removed meanwhile
            path.rename(path.parent / ACCEPTED / path.name)
        error.unlink(missing_ok=True)
        log.info("%s is accepted", path)


def admit_operator(store: Store, path: Path, quota: Quota) -> None:
    """Make tenant and key where they are missing; the file alone decides which key is the operator's."""
    if not path.exists():
        write_file(path, f"{new_key()}\n", mode=0o600, durable=True)
    digest = digest_of(path.read_text(encoding="ascii").strip())

    def admit(tx: Transaction) -> None:
        if LOCAL not in tx.tables.quotas:
            put_tenant(tx, LOCAL, quota)
        if (known := tx.tables.keys.get(digest)) is None or not known.operator:
            put_key(tx, Key(digest=digest, tenant=LOCAL, label="operator", operator=True))

    store.change(admit, time.time())
