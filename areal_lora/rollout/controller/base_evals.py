"""Evaluations of the base model: a set is asked once for all adapters whose version 0 equals the base.

``base_key`` says which evaluations have one result (pure), `BaseEvals` asks for each once and keeps it in the run
folder: for adapters that join later, and for a resumed run.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import msgspec

from areal_lora.config.adapter_run import adapter_run
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.channel_messages import EvalSetResult
from areal_lora.rollout.controller.eval_sets import EvalSet
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef

log = get_logger(__name__)


def base_key(config: Config, adapter: AdapterConfig, chosen: EvalSet) -> str | None:
    """Digest of all that version 0's result on ``chosen`` depends on; None where version 0 is not the base.

    Adapters with equal keys have one result. Not part of it are the adapter's name, rank, targets and training
    settings: lora_B is 0. Where answers are drawn at random, or the workflow is given a seed, the seed and the name of
    the set count.
    """
    if adapter.init_from is not None:
        return None
    model, held_out = config.model, chosen.held_out
    problems = [
        (sample.uid, sample.prompt, sample.messages, sample.answer, dict(sample.columns), ids)
        for sample, ids in zip(held_out.samples, held_out.token_ids, strict=True)
    ]
    parts: dict[str, Any] = {
        "base": [model.path, model.commit, model.dtype],
        "max_model_len": config.rollout.max_model_len,
        "problems": problems,
        "left_out": held_out.left_out,
        "set": chosen.config.model_dump(mode="json", exclude={"name", "task"}),
        "sampling": chosen.sampling.model_dump(mode="json", exclude={"prompts_per_step"}),
        "workflow": chosen.workflow.model_dump(mode="json"),
        "format": chosen.formatter.how.model_dump(mode="json"),
        "rewards": [reward.model_dump(mode="json") for reward in adapter.rewards],
        "random": None if chosen.single_greedy else [chosen.name, adapter_run(config, adapter).seed],
    }
    text = json.dumps(parts, sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """``result`` was measured with version 0 of ``adapter``."""

    adapter: str
    result: EvalSetResult


class BaseEvals:
    """The results of a run by key, in memory and in ``folder``, if there is one."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self._folder = folder
        self._kept: dict[str, _Kept] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def once(self, key: str, ref: AdapterRef, measure: Callable[[], Awaitable[EvalSetResult]]) -> EvalSetResult:
        """The result of ``key``: what ``measure`` returns for ``ref``, or what another adapter has been asked before.

        Callers of one key wait for each other. A result with an error, or a ``measure`` that is cancelled, is not kept:
        the next caller asks. A result of another adapter says so, and has taken no time.
        """
        async with self._turns[key]:
            kept = self._kept.get(key) or self._read(key)
            if kept is None:
                result = await measure()
                if not result.error:
                    self._keep(key, _Kept(adapter=ref.name, result=result))
                return result
        self._kept[key] = kept
        if kept.adapter == ref.name:
            return kept.result
        return msgspec.structs.replace(kept.result, measured_with=kept.adapter, wall_s=0.0)

    def _keep(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        if self._folder is None:
            return
        path = self._folder.base_eval(key)
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("%s: %s; after a restart the base is evaluated again", path, error.strerror)

    def _read(self, key: str) -> _Kept | None:
        if self._folder is None:
            return None
        path = self._folder.base_eval(key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, so the base is evaluated again: %s", path, error)
            return None
