"""A user's own objective and advantage, named by path in place of a row of the tables.

Each is called on random samples before anything is trained, on every rank: what a table's row guarantees is checked,
because packing, micro-batches and data-parallel ranks depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from areal_lora.algorithms.advantages import Advantage, Samples
from areal_lora.algorithms.losses import Clip, Loss, Objective, Tokens
from areal_lora.errors import ConfigError
from areal_lora.processes.loading import load_import_path
from areal_lora.processes.log import get_logger

STEP, TOLERANCE = 1e-6, 1e-4  # of central differences in float64, relative to the largest gradient
LENGTHS = (5, 1, 8)  # of the random sequences
FAULTS = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)

log = get_logger(__name__)


def own_loss(path: str, clip: Clip) -> Loss:
    """The objective ``function(clip: Clip, tokens: Tokens) -> Tensor [t]`` at ``path``: maximised for each token.

    A gradient that central differences contradict is logged: a stopped gradient is meant, a mistake is not.

    Raises:
        ConfigError: it cannot be imported or fails; its result has another shape, is not finite, has no gradient, or
            differs from call to call; a sequence's values depend on the others of its micro-batch.
    """
    function = load_import_path(path)

    def loss(clip: Clip, tokens: Tokens) -> Objective:
        return Objective(value=function(clip, tokens), clipped=torch.zeros_like(tokens.on))

    tokens = _tokens()
    value = _checked(path, function, clip, tokens, like=tokens.logprobs)
    if not value.requires_grad:
        _refuse(path, "its result has no gradient", "compute it from tokens.logprobs with torch")
    [gradient] = torch.autograd.grad(value.sum(), tokens.logprobs)
    if not gradient.isfinite().all():
        _refuse(path, "its gradient is not finite", "bound the ratio, as areal_lora.algorithms.losses.ratio_of does")
    for start, end in zip(tokens.cu_seqlens[:-1].tolist(), tokens.cu_seqlens[1:].tolist(), strict=True):
        alone = _checked(path, function, clip, _part(tokens, start, end), like=tokens.logprobs[start:end])
        if not torch.allclose(alone, value[start:end], rtol=1e-9, atol=1e-12):
            fix = "reduce over a sequence at most: areal_lora.algorithms.losses has sequence_sums and spread"
            _refuse(path, "a sequence's values depend on the other sequences of its micro-batch", fix)
    far = (gradient - _differences(function, clip, tokens)).abs() > TOLERANCE * gradient.abs().max()
    if far.any():
        n = int(far.sum())
        log.warning(
            "%s: its gradient is not that of its value at %d of %d random tokens: correct if it stops a gradient "
            "(detach), a mistake otherwise",
            path,
            n,
            len(far),
        )
    return loss


def own_advantage(path: str) -> Advantage:
    """The advantage ``function(samples: Samples) -> Tensor [S]`` at ``path``.

    Raises:
        ConfigError: it cannot be imported or fails; its result has another shape, is not finite, differs from call to
            call or depends on the order of the samples.
    """
    function = load_import_path(path)
    generator, n = torch.Generator().manual_seed(0), 12
    samples = Samples(
        rewards=torch.randn(n, generator=generator, dtype=torch.float64),
        group_ids=torch.arange(n) // 4,
        lengths=torch.randint(1, 9, (n,), generator=generator).double(),
        baselines=torch.zeros(n, dtype=torch.float64),
    )
    values = _checked(path, function, samples, like=samples.rewards)
    order = torch.randperm(n, generator=generator)
    mixed = {name: getattr(samples, name)[order] for name in ("rewards", "group_ids", "lengths", "baselines")}
    if not torch.allclose(_checked(path, function, replace(samples, **mixed), like=values), values[order]):
        _refuse(path, "its result depends on the order of the samples", "tell groups apart by samples.group_ids")
    return Advantage(of=function)


def _checked(path: str, function: Callable[..., Any], *arguments: object, like: Tensor) -> Tensor:
    try:
        value, again = function(*arguments), function(*arguments)
    except FAULTS as error:
        raise ConfigError(path, f"it fails on random samples: {type(error).__name__}: {error}", "correct it") from error
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        _refuse(path, f"it returns {found} in place of {like.dtype} {list(like.shape)}", "return one value for each")
    if not value.isfinite().all():
        _refuse(path, "its result is not finite on random samples", "correct it")
    if not torch.equal(value, again):
        _refuse(path, "its result differs from call to call", "draw no random numbers: ranks would differ")
    return value


def _refuse(path: str, reason: str, fix: str) -> NoReturn:
    raise ConfigError(path, reason, fix)


def _tokens() -> Tokens:
    """Random sequences; the last token of each is off the mask where there are others."""
    generator, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    on = torch.ones(n, dtype=torch.bool)
    on[cu_seqlens[1:] - 1] = torch.tensor(LENGTHS) == 1
    old, moved, advantages = (
        torch.where(on, x, 0.0) for x in torch.randn(3, n, generator=generator, dtype=torch.float64)
    )
    logprobs = (-1.0 - old.abs() + 0.2 * moved).where(on, 0.0)
    return Tokens(
        logprobs=logprobs.requires_grad_(),
        old=(-1.0 - old.abs()).where(on, 0.0),
        advantages=advantages,
        on=on,
        cu_seqlens=cu_seqlens,
    )


def _part(tokens: Tokens, start: int, end: int) -> Tokens:
    """The sequence that is ``tokens[start:end]``."""
    arrays = {name: getattr(tokens, name)[start:end] for name in ("logprobs", "old", "advantages", "on")}
    return Tokens(**arrays, cu_seqlens=torch.tensor([0, end - start]))


def _differences(function: Callable[..., Tensor], clip: Clip, tokens: Tokens) -> Tensor:
    """The gradient of the summed value by central differences. [t]"""
    shifts = STEP * torch.eye(tokens.logprobs.numel(), dtype=torch.float64)
    with torch.no_grad():
        sums = [
            function(clip, replace(tokens, logprobs=tokens.logprobs + sign * shift)).sum()
            for shift in shifts
            for sign in (1, -1)
        ]
    return torch.stack(sums).view(-1, 2) @ torch.tensor([1.0, -1.0], dtype=torch.float64) / (2 * STEP)
