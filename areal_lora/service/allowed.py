"""What a tenant's adapter may name: nothing that is code, a file or an address, unless the operator offers it.

A reward, a workflow or a filter by path, and the tests of the reward ``code``, run as the user of the run, and a file
is read as that user. So a tenant may use the other built-in tasks and rewards, what the section ``service.api`` of the
base configuration lists, and files of its own folder. Numbers that would make the run work without end are bounded by
the tenant's quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from areal_lora.config.models import AdapterConfig, AgentWorkflowConfig, CustomWorkflowConfig, MultiTurnWorkflowConfig
from areal_lora.config.sections.reward import (
    CodeReward,
    FunctionReward,
    JudgeReward,
    RewardConfig,
    RewardsConfig,
    reward_keys,
)
from areal_lora.config.sections.service import CODE_REWARD, ApiConfig
from areal_lora.config.sections.task import DatasetTask, TaskConfig, WordProblemsTask
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.refused import RequestError

SHARED = "shared"
"""The folder below ``service.api.data`` whose files every tenant may name."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,128}")
MAX_NAMES, MAX_LENGTH = 64, 256


def allowed(adapter: AdapterConfig, offered: ApiConfig, quota: Quota, tenant: str) -> AdapterConfig:
    """``adapter`` with the whole paths of the tenant's files. Raises RequestError for what it may not name."""
    for refused in (*_code(adapter, offered), *_judges(adapter, offered), *_sizes(adapter, quota)):
        raise refused
    evals = [
        each
        if each.task is None
        else each.model_copy(update={"task": _task(each.task, f"evals.{i}.task", offered, quota, tenant)})
        for i, each in enumerate(adapter.evals)
    ]
    changes: dict[str, object] = {"task": _task(adapter.task, "task", offered, quota, tenant), "evals": evals}
    if adapter.init_from is not None:
        changes["init_from"] = str(_file(adapter.init_from, "init_from", offered, tenant))
    return adapter.model_copy(update={key: value for key, value in changes.items() if value != getattr(adapter, key)})


def _code(adapter: AdapterConfig, offered: ApiConfig) -> Iterator[RequestError]:
    """User code that the operator does not offer."""
    for key, text in _named_code(adapter):
        if text not in offered.code:
            choices = ", ".join(offered.code) or "none"
            fix = f"use a built-in one, or what the operator offers ({choices})"
            yield RequestError(422, key, "user code runs as the user of the run, and this code is not offered", fix)


def _named_code(adapter: AdapterConfig) -> Iterator[tuple[str, str]]:
    for key, reward in _rewards(adapter.reward):
        if isinstance(reward, FunctionReward):
            yield f"{key}.path", reward.path
        elif isinstance(reward, CodeReward):
            yield f"{key}.kind", CODE_REWARD  # the tests are programs in the tenant's rows
    workflow = adapter.workflow
    if isinstance(workflow, MultiTurnWorkflowConfig):
        yield "workflow.environment", workflow.environment
    elif isinstance(workflow, CustomWorkflowConfig | AgentWorkflowConfig):
        yield "workflow.path", workflow.path
    if isinstance(workflow, AgentWorkflowConfig) and workflow.tool_parser and not workflow.tool_parser.isidentifier():
        yield "workflow.tool_parser", workflow.tool_parser
    tasks = [("task", adapter.task), *((f"evals.{i}.task", each.task) for i, each in enumerate(adapter.evals))]
    for key, task in tasks:
        if isinstance(task, DatasetTask) and task.keep is not None:
            yield f"{key}.keep", task.keep


def _judges(adapter: AdapterConfig, offered: ApiConfig) -> Iterator[RequestError]:
    """Addresses that scorers would ask, and keys that they would send there."""
    for key, reward in _rewards(adapter.reward):
        if not isinstance(reward, JudgeReward):
            continue
        if reward.url not in offered.judges:
            choices = ", ".join(offered.judges) or "none"
            yield RequestError(422, f"{key}.url", "this judge is not offered", f"use one that is: {choices}")
        elif reward.key_env is not None and reward.key_env != offered.judges[reward.url]:
            fix = "leave it out, or use the variable that the operator offers for this judge"
            yield RequestError(422, f"{key}.key_env", "this variable is not offered for the judge", fix)


def _sizes(adapter: AdapterConfig, quota: Quota) -> Iterator[RequestError]:
    rewards = _rewards(adapter.reward)
    for key, found, most in (
        ("reward", sum(reward.workers for _, reward in rewards), quota.workers),
        ("sampling", adapter.sampling.prompts_per_step * adapter.sampling.n_samples, quota.sequences),
        ("evals", max((each.n_samples for each in adapter.evals), default=0), quota.sequences),
        ("reward", max((r.memory_mib for _, r in rewards if isinstance(r, FunctionReward)), default=0), 1 << 12),
    ):
        if found > most:
            yield RequestError(422, key, f"{found} is above the quota of {most}", f"use at most {most}")
    for key, names in (
        ("target_modules", adapter.target_modules),
        ("exclude_modules", adapter.exclude_modules),
        ("rank_pattern", list(adapter.rank_pattern)),
        ("alpha_pattern", list(adapter.alpha_pattern)),
        ("evals", [each.name for each in adapter.evals]),
        ("sampling.stop", adapter.sampling.stop),
    ):
        if len(names) > MAX_NAMES or any(len(name) > MAX_LENGTH for name in names):
            reason = f"more than {MAX_NAMES} entries, or one longer than {MAX_LENGTH} characters"
            yield RequestError(422, key, reason, "use fewer and shorter ones")
    for key, patterns in (("rank_pattern", adapter.rank_pattern), ("alpha_pattern", adapter.alpha_pattern)):
        if wrong := next((pattern for pattern in patterns if not _PLAIN.fullmatch(pattern)), None):
            reason = f"{wrong[:64]!r} is more than a plain name, and expressions can take hours to compare"
            yield RequestError(422, key, reason, "name modules by letters, digits, _ and .")


def _rewards(rewards: RewardsConfig) -> list[tuple[str, RewardConfig]]:
    return [(key.removeprefix("."), reward) for key, reward in reward_keys("", rewards)]


def _task(task: TaskConfig, key: str, offered: ApiConfig, quota: Quota, tenant: str) -> TaskConfig:
    """``task`` with whole paths. Raises RequestError for another's file, and a hub data set that is not offered."""
    if isinstance(task, WordProblemsTask):
        if max(task.n_train, task.n_eval) > quota.problems:
            raise RequestError(
                422, key, f"more than {quota.problems} generated problems", f"use at most {quota.problems}"
            )
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


def _file(text: str, key: str, offered: ApiConfig, tenant: str) -> Path:
    """The whole path of a file or folder that ``tenant`` may name, with no link to anywhere else."""
    refused = RequestError(
        422,
        key,
        f"{text[:MAX_LENGTH]!r} is neither one of your files nor an offered data set",
        f"name a file of your folder, or one of {', '.join([f'{SHARED}/...', *offered.data_sets])}",
    )
    if offered.data is None or "\0" in text or not text.strip():
        raise refused
    try:
        folders = [(offered.data / name).resolve() for name in (tenant, SHARED)]
        for start in (folders[0], offered.data.resolve()):
            path = (start / text).resolve()
            if path.exists() and any(path != folder and path.is_relative_to(folder) for folder in folders):
                return path
    except (OSError, RuntimeError, ValueError):  # a name that is too long, links in a circle
        raise refused from None
    raise refused
