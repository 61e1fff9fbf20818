"""Clients' passes as a batch of the trainer, their losses, and the answers; and what clients save of their adapters.

Saved states, ``RUN/states/ADAPTER/LABEL``, are folders like those of checkpoints and outlive the adapter. One is
written beside its place and then takes it, so that a crash leaves hidden folders (`tidy_states`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from areal_lora.algorithms.token_losses import Bounds, Targets, bounds_of, token_loss
from areal_lora.checkpoint.checkpoint_store import leftovers_in, looks_whole
from areal_lora.checkpoint.recover import verify
from areal_lora.checkpoint.state import Disk, files_of, read_manifest, read_tensors
from areal_lora.config.models import Config
from areal_lora.data.collate import HOST, scoring_batch, select
from areal_lora.distributed.store import Exchange, first_problem
from areal_lora.engine.base import LossFn, LossSums, MicroBatch
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import CheckpointError
from areal_lora.families.shape import ModelShape
from areal_lora.operations.protocol import Datum, LoadState, Loss, OperationFailure, Pass, PassResult, StateResult
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import AdapterRef, TrainBatch

FLOATS = ("weights", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens are below ``vocabulary``, sequences have at most ``longest`` of them."""

    vocabulary: int
    longest: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> "Limits":
        longest = config.trainer.max_tokens_per_microbatch * config.trainer.cp
        return cls(vocabulary=shape.vocab, longest=min(longest, shape.max_positions or longest))


def problem(request: Pass, limits: Limits) -> str:
    """Why the pass cannot be computed; empty if it can."""
    if not request.data:
        return "a pass without data"
    settings = request.settings
    given = [x for x in (settings.clip_low, settings.clip_high, settings.beta) if x is not None]
    if not all(np.isfinite(given)) or any(x < 0 for x in given):
        return "a setting of the loss is negative or not finite"
    bounds = bounds_of(request.loss, settings)
    if bounds.low > bounds.high:
        return f"the lower bound {bounds.low:g} of the ratio is above the upper one {bounds.high:g}"
    for number, datum in enumerate(request.data):
        if wrong := _wrong(datum, request.loss, limits):
            return f"datum {number}: {wrong}"
    return ""


def _wrong(datum: Datum, loss: Loss, limits: Limits) -> str:
    if len(datum.tokens) % 4 or any(len(getattr(datum, name)) % 4 for name in FLOATS):
        return "an array is cut off"
    tokens = np.frombuffer(datum.tokens, "<i4")
    if not 2 <= len(tokens) <= limits.longest:
        return f"{len(tokens)} tokens, between 2 and {limits.longest} are possible"
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        return f"token {int(tokens.min()) if tokens.min() < 0 else int(tokens.max())} is not in the vocabulary"
    for name in FLOATS:
        values = np.frombuffer(getattr(datum, name), "<f4")
        needed = name == "weights" or loss is not Loss.CROSS_ENTROPY
        if needed and len(values) != len(tokens) - 1:
            return f"{len(values)} {name} for {len(tokens) - 1} targets"
        if not np.isfinite(values).all():
            return f"{name} that are not finite"
    return ""


def batch_of(requests: Mapping[str, Pass]) -> TrainBatch:
    """The data of the passes by adapter, in order. Entry t of every array refers to token t: they start with a 0.

    The data of a pass are a group.
    """
    every = [(datum, one.loss is not Loss.CROSS_ENTROPY) for one in requests.values() for datum in one.data]
    batch = scoring_batch([np.frombuffer(datum.tokens, "<i4") for datum, _ in every], "")
    weights = _packed([datum.weights for datum, _ in every])
    unused = [bytes(len(datum.weights)) for datum, _ in every]
    mask, adapters = weights != 0, tuple(name for name, one in requests.items() for _ in one.data)
    return replace(
        batch,
        loss_mask=mask,
        rollout_logprobs=_packed([x.logprobs if used else zeros for (x, used), zeros in zip(every, unused)]),
        versions=torch.where(mask, 0, -1).int(),
        adapters=adapters,
        advantages=_packed([x.advantages if used else zeros for (x, used), zeros in zip(every, unused)]),
        weights=weights,
    )


def _packed(rows: Sequence[bytes]) -> Tensor:
    """[T] fp32 of arrays that lack the entry of each first token."""
    first = np.zeros(1, np.float32)
    return torch.from_numpy(np.concatenate([part for row in rows for part in (first, np.frombuffer(row, "<f4"))]))


def make_loss(loss: Loss, bounds: Bounds) -> LossFn:
    def sums(micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.advantages is not None
        assert micro.weights is not None
        targets = Targets(
            logprobs=logprobs,
            sampled=micro.rollout_logprobs,
            advantages=micro.advantages,
            weights=micro.weights,
            cu_seqlens=micro.cu_seqlens,
        )
        return LossSums(loss=token_loss(loss, bounds, targets))

    return sums


def carry_out(engine: AdapterEngine, requests: Mapping[str, Pass]) -> dict[str, PassResult]:
    """Compute passes that have no `problem`, by adapter, together; gradients are added to the adapters'. Collective.

    All have gradients (``backward``), or none.
    """
    batch = batch_of(requests)
    losses = {name: make_loss(one.loss, bounds_of(one.loss, one.settings)) for name, one in requests.items()}
    scores, sums = torch.zeros(batch.n_tokens, device=HOST), dict[str, float]()
    if any(one.backward for one in requests.values()):
        found = engine.forward_backward_of_each(batch, losses, scores=scores)
        sums = {name: own["loss"] for name, own in found.items()}
    else:
        scores = engine.logprobs_of_each(batch)
    flat, results, first = scores.numpy().astype("<f4"), dict[str, PassResult](), 0
    for name, one in requests.items():
        own = select(batch, range(first, first := first + len(one.data)))
        bounds = batch.cu_seqlens[first - len(one.data) : first + 1].tolist()
        if not one.backward:
            sums[name] = float(losses[name](own, scores[bounds[0] : bounds[-1]], None).loss)
        rows = tuple(flat[a + 1 : b].tobytes() for a, b in pairwise(bounds))
        results[name] = PassResult(logprobs=rows, loss=sums[name])
    return results


LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def named(*names: str) -> str:
    """Why these are no names of an adapter and of a label; empty if they are."""
    wrong = next((name for name in names if not NAME.fullmatch(name)), None)
    return "" if wrong is None else f"{wrong[:128]!r} is no name: up to 128 letters, digits, ., _ and -"


def loadable(run_folder: RunFolder, request: LoadState, adapter: Adapter, base: str) -> str:
    """Why ``adapter`` on the base with the digest ``base`` cannot become what was saved; empty if it can."""
    if wrong := named(request.adapter, request.label):
        return wrong
    folder = run_folder.saved_state(request.adapter, request.label)
    try:
        saved = read_manifest(folder)
        verify(folder, AdapterRef(name=saved.spec.name, version=saved.version))
    except FileNotFoundError:
        return f"{request.adapter} has no saved state {request.label!r}"
    except (OSError, CheckpointError) as error:
        return f"the saved state {request.label!r} of {request.adapter} cannot be read: {error}"
    if saved.spec.bare() != adapter.spec.bare():
        return f"the saved state {request.label!r} is of an adapter with another rank, alpha or other modules"
    return "" if saved.base_digest == base else f"the saved state {request.label!r} is of another base model"


def load_saved(
    engine: AdapterEngine, run_folder: RunFolder, request: LoadState, adapter: str, exchange: Exchange
) -> StateResult | OperationFailure:
    """Set the adapter to a state that is `loadable`. Without the optimizer its moments and its clock start again.

    Collective. Failed, and the adapter is as it was, if a rank cannot read it: a shared file system may show rank 0
    a folder before the others.
    """
    folder = run_folder.saved_state(request.adapter, request.label)
    problem = ""
    try:
        saved = read_manifest(folder)
        parts = read_tensors(folder, saved)
    except (OSError, CheckpointError) as error:
        problem = f"trainer rank {exchange.rank} cannot read the saved state {request.label!r}: {error}"
    if problem := first_problem(problem, exchange):
        return OperationFailure(reason=f"{problem} (fix: load it again)", by_client=False)
    step = saved.clock.step if request.optimizer else 0
    if not request.optimizer:
        empty = {name: np.zeros_like(values) for name, values in parts["weight"].items()}
        parts = {part: values if part == "weight" else empty for part, values in parts.items()}
    engine.load_state(adapter, parts, step)
    return StateResult(step=step, n_bytes=sum(entry.nbytes for entry in files_of(saved)))


def tidy_states(run_folder: RunFolder, disk: Disk) -> None:
    """Remove what crashes left of states that were being saved, but a whole one takes its place where there is none.

    A state that takes the place of another one moves that aside first. After a crash between the two both are whole
    and hidden, and one of them takes the place again: the save had no answer, and is requested again. Only while no
    process saves. Reads manifests and sizes. Raises CheckpointError.
    """
    try:
        for path in [path for root in sorted(run_folder.saved_states.glob("*")) for path in leftovers_in(root)]:
            match = LEFTOVER.fullmatch(path.name)
            if match is not None and looks_whole(path) and not looks_whole(place := path.with_name(match[1])):
                disk.remove(place)
                disk.rename(path, place)
                disk.fsync_folder(path.parent)
            else:
                disk.remove(path)
    except OSError as error:
        fix = "make the folder of saved states writable, then start the run again"
        raise CheckpointError(f"{error.filename}: {error.strerror} (fix: {fix})") from error
