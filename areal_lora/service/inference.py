"""Limits of tenants' inference: the size of a request, tokens in progress, and requests a minute.

Training rollouts come first: a server starts a tenant's request as if it had arrived `generate.BACKGROUND_S` later.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from areal_lora.network.request_size import DEFAULT_MAX_TOKENS, Prompt, prompts_of, too_large
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.refused import RequestError

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    """What the size of a body for the data plane is made of."""

    prompt: Prompt | None = None
    n: _Count = 1
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | _Count | None = None
    top_logprobs: _Count = 0


def n_tokens(body: dict[str, Any], context: int) -> int:
    """Tokens that ``body`` requests, prompts included, times 1 + their log-probabilities.

    ``context`` is what a sequence may have; an answer without a limit counts as long, and so does a text with as many
    bytes. Raises RequestError.
    """
    try:
        size = msgspec.convert(body, _Size)
        prompts = [] if size.prompt is None else prompts_of(size.prompt)
    except msgspec.ValidationError as error:
        raise RequestError(422, "body", str(error), "correct the request") from None
    if size.prompt is None:  # a chat, where the data plane takes 0 for no limit
        n_prompts, n_read = 1, min(context, len(msgspec.json.encode(body.get("messages"))))
        n_new = size.max_completion_tokens or size.max_tokens or context
    else:
        n_prompts = len(prompts)
        n_read = sum(min(context, len(each.encode())) if isinstance(each, str) else len(each) for each in prompts)
        n_new = DEFAULT_MAX_TOKENS if size.max_tokens is None else size.max_tokens
    top = size.top_logprobs if isinstance(size.logprobs, bool) else size.logprobs or 0
    tokens = n_read + n_prompts * n_new
    if reason := too_large(n_prompts, size.n, tokens, top):
        reason, _, fix = reason.partition("; ")
        raise RequestError(422, "n", reason, fix)
    return size.n * tokens * (1 + top)


class Meter:
    """Tokens in progress and requests of every tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}

    def request(self, tenant: str, quota: Quota) -> None:
        """Count one request. Raises RequestError (429) above ``quota.requests`` a minute, which may come at once."""
        now, rate = self._clock(), quota.requests / 60
        at, spent = self._spent.get(tenant, (now, 0.0))
        spent = max(0.0, spent - (now - at) * rate) + 1
        if spent > quota.requests:
            reason = f"{quota.requests} requests a minute are the quota"
            raise RequestError(
                429, "requests", reason, "send fewer", retry_s=math.ceil((spent - quota.requests) / rate)
            )
        self._spent[tenant] = now, spent

    def start(self, tenant: str, tokens: int, quota: Quota | None = None) -> None:
        """Count ``tokens`` as in progress until `end`. Raises RequestError where they exceed ``quota``."""
        if quota is not None and tokens > quota.tokens:
            reason = f"{tokens} tokens are above the quota of {quota.tokens}"
            raise RequestError(422, "tokens", reason, "lower n or max_tokens, or send several requests")
        if quota is not None and self._tokens[tenant] + tokens > quota.tokens:
            reason = f"{quota.tokens} tokens in progress are the quota"
            raise RequestError(429, "tokens", reason, "wait for requests in progress", retry_s=1)
        self._tokens[tenant] += tokens

    def end(self, tenant: str, tokens: int) -> None:
        self._tokens[tenant] -= tokens
        if not self._tokens[tenant]:
            del self._tokens[tenant]

    @contextmanager
    def running(self, tenant: str, tokens: int, quota: Quota) -> Iterator[None]:
        self.start(tenant, tokens, quota)
        try:
            yield
        finally:
            self.end(tenant, tokens)
