"""HTTP client of models that others serve behind OpenAI's or vLLM's API: a judge, a reward model, a teacher."""

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import msgspec

from areal_lora.errors import ConfigError

LONGEST_PAUSE_S = 60.0
RETRIED = frozenset({408, 409, 425, 429})

T = TypeVar("T")


class ApiLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one attempt, attempts of one request, pause before the second one (it doubles), open requests."""

    attempt_s: float
    attempts: int
    backoff_s: float
    concurrency: int
    reply_bytes: int = 1 << 20


class ApiFault(Exception):
    """A request has no answer; the text is the reason. ``passing``: a later request may have one."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(reason)
        self.passing = passing


class _TryAgain(Exception):
    """An attempt failed in a way that the next one may not. ``after_s``: the server's wish."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class ApiClient:
    """Requests to ``url`` with the key in the environment variable ``key_env``, if there is one.

    ``costs`` adds up calls, retries and milliseconds. Raises ConfigError with the key ``at`` of the configuration if
    the variable is not set.
    """

    def __init__(self, url: str, key_env: str | None, limits: ApiLimits, at: str) -> None:
        self.url, self._limits = url.rstrip("/"), limits
        self._headers = {"Content-Type": "application/json"}
        self._key = "" if key_env is None else os.environ.get(key_env, "").strip()  # from a file, perhaps
        if key_env is not None and not self._key:
            raise ConfigError(f"{at}.key_env", f"the environment variable {key_env} is not set")
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self.costs: defaultdict[str, float] = defaultdict(float)

    async def post(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """What ``read`` makes of the answer to ``body``; a ValueError of it counts as a failed attempt.

        Lost connections, attempts out of time, statuses that pass and such answers are repeated with growing pauses.
        Raises ApiFault.
        """
        limits, reason = self._limits, ""
        for attempt in range(limits.attempts):
            try:
                async with self._slots:
                    reply = await self._attempt(self.url + path, body)
                try:
                    return read(reply)
                except (ValueError, IndexError, msgspec.MsgspecError) as error:
                    raise _TryAgain(f"unreadable reply: {error}: {self._shown(reply)}") from None
            except _TryAgain as error:
                reason, wish_s = str(error), error.after_s
            if attempt + 1 < limits.attempts:
                self.costs["retries"] += 1
                pause_s = limits.backoff_s * 2**attempt * random.uniform(0.75, 1.25)
                await asyncio.sleep(min(max(pause_s, wish_s), LONGEST_PAUSE_S))
        raise ApiFault(f"no answer in {limits.attempts} attempts, the last: {reason}", passing=True)

    def take_costs(self) -> dict[str, float]:
        """What was spent since the last call."""
        costs = dict(self.costs)
        self.costs.clear()
        return costs

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, url: str, body: bytes) -> bytes:
        """One request. Raises _TryAgain, ApiFault."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._limits.attempt_s)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True)
        self.costs["calls"] += 1
        start_s = time.monotonic()
        try:
            # Redirects are not followed: the key belongs to this address.
            async with self._session.post(url, data=body, headers=self._headers, allow_redirects=False) as response:
                status, wish = response.status, response.headers.get("Retry-After", "")
                try:  # one byte more than a reply may have
                    await response.content.readexactly(self._limits.reply_bytes + 1)
                    raise _TryAgain(f"a reply of more than {self._limits.reply_bytes >> 20} MiB")
                except asyncio.IncompleteReadError as whole:
                    reply = whole.partial
        except TimeoutError:
            raise _TryAgain(f"no reply within {self._limits.attempt_s:g} s") from None
        except aiohttp.ClientError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        finally:
            self.costs["ms"] += 1000 * (time.monotonic() - start_s)
        if status in RETRIED or status >= 500:
            raise _TryAgain(f"HTTP {status}", float(wish) if wish.isdigit() else 0.0)
        if status != 200:
            raise ApiFault(f"HTTP {status}: {self._shown(reply)}", passing=False)
        return reply

    def _shown(self, text: bytes) -> str:
        """The start of ``text`` without the key."""
        shown = " ".join(text[:2000].decode(errors="replace").split())
        return (shown.replace(self._key, "***") if self._key else shown)[:200]
