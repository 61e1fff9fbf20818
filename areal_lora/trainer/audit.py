"""Audit a batch: a server scores a few sequences again under the version that sampled them (contract C10).

Both come from the same weights at any staleness, and must agree in every step, also in one without fresh tokens. The
audit compares the batch as the trainer holds it::

    step k    start: choose excerpts ----> thread: query a server that holds their version
              annotate, learn              compare; query again under version k, for the mismatch's parts
              collect: finished audits; an unfinished one is collected in step k + 1

With kept KV caches no version confirms the tokens after a change of version: only the others decide whether the batch
is right, and the mismatch's part ``record`` is what the caches change.

Servers score in the whole distribution. Where sampling truncates it, records are brought to the whole one for this
(`TokenColumns.log_mass`).

The training step never waits for a server: a batch whose predecessor is still compared is not audited, or, in a step
that measures causes, after it. If a server is lost or has retired the version, or a comparison fails otherwise, the
excerpt is not compared. The step's record counts such steps (`Audit.silent_steps`). The mismatch's parts need scores
under version k only; merged weights are one version, so with them ``record`` is part of ``staleness``.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from areal_lora.algorithms.mismatch import ServerScores, after_change, is_shifted, shift_votes
from areal_lora.errors import PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef, TrainBatch
from areal_lora.weight_sync.admin_client import AdminClient
from areal_lora.weight_sync.messages import ServerEndpoint

SEQUENCES = 4  # of each batch
COMPARED = 1024  # sampled tokens of a sequence
SCORED = 4096  # tokens of a batch that a server computes; beyond them `FEWEST` sequences are enough
FEWEST = 2  # sequences: a single one may have crossed a tie between experts, which rounding decides
QUIET_STEPS = 10  # steps without a comparison before a warning

log = get_logger(__name__)

Score = Callable[[AdapterRef | None, list[list[int]]], list[list[float]]]
"""A server's log-probabilities of sequences under a version, or the base; raises PublishError if no server gives them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The beginning of sequence number ``sequence``, up to the last of the tokens to compare, sampled by ``ref``.

    ``start`` is its first token in the batch, ``at`` are the positions of those tokens from there, ``exact`` of those
    that ``ref`` sampled alone, ``recorded`` [T] the sampler's log-probabilities in the whole distribution (0
    elsewhere), ``kept`` [T] those over the kept ids. ``mixed``: it has tokens of other versions, too.
    """

    sequence: int
    start: int
    ref: AdapterRef
    token_ids: list[int]  # [T]
    at: list[int]
    exact: list[int]
    mixed: bool
    recorded: list[float]  # [T]
    kept: list[float]  # [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTokens:
    """Tokens of a batch for ``version``, at its places ``at`` [n], with the servers' ``scores`` of them.

    ``fresh`` [n]: sampled under that version, and all before it. ``causes``: its step measures causes.
    """

    version: int
    at: list[int]
    fresh: list[bool]
    scores: ServerScores
    causes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of one audit of a batch of ``adapter``: of ``tokens``, with the mean |recorded - scored| ``gap``.

    ``error`` states how the batch contradicts its recorded versions, ``missing`` why excerpts could not be compared.
    ``silent_steps`` counts steps in a row without a comparison. ``took_s`` is the time in the audit thread.
    ``rescored``: None if no server has scored the tokens under the version in training.
    """

    adapter: str = ""
    tokens: int = 0
    gap: float | None = None
    error: str = ""
    missing: str = ""
    silent_steps: int = 0
    took_s: float = 0.0
    rescored: AuditedTokens | None = None


def choose(
    batch: TrainBatch, name: str, seed: int, max_tokens: int | None = None, kept_caches: bool = False
) -> list[Excerpt]:
    """Choose excerpts of `SEQUENCES` sequences, one per version in each; deterministic in batch and ``seed``.

    `COMPARED` sampled tokens in a row are compared, anywhere in the first ``max_tokens`` of a sequence. Beyond `SCORED`
    tokens in all excerpts `FEWEST` sequences are enough.
    ``kept_caches``: tokens after a change of version in their answer are of several versions.
    """
    bounds = batch.cu_seqlens.tolist()
    whole = batch.rollout_logprobs if batch.log_mass is None else batch.rollout_logprobs + batch.log_mass
    draw, found, chosen, scored = random.Random(seed), list[Excerpt](), 0, 0
    for sequence in draw.sample(range(batch.n_sequences), batch.n_sequences):
        start = bounds[sequence]
        its = slice(start, min(bounds[sequence + 1], start + (max_tokens or batch.n_tokens)))
        versions, sampled = batch.versions[its].tolist(), batch.loss_mask[its].nonzero().flatten().tolist()
        tokens, recorded, kept = (x[its].tolist() for x in (batch.token_ids, whole, batch.rollout_logprobs))
        changed = after_change(batch.versions[its], batch.loss_mask[its]).tolist()
        first = draw.randrange(max(1, len(sampled) - COMPARED + 1))
        run = sampled[first : first + COMPARED]
        for version in sorted({versions[t] for t in run}):
            at = [t for t in run if versions[t] == version]
            ref, end = AdapterRef(name=name, version=version), at[-1] + 1
            own = {"start": start, "token_ids": tokens[:end], "recorded": recorded[:end], "kept": kept[:end]}
            exact = [t for t in at if not (kept_caches and changed[t])]
            mixed = any(versions[t] != version for t in sampled if t < end)
            found.append(Excerpt(sequence=sequence, ref=ref, at=at, exact=exact, mixed=mixed, **own))
            scored += end
        chosen += bool(run)
        if chosen == SEQUENCES or (chosen >= FEWEST and scored >= SCORED):
            break
    return found


def audit(
    excerpts: Sequence[Excerpt], score: Score, limit: float, current: AdapterRef | None = None, *, base: bool = False
) -> Audit:
    """Compare excerpts with scores. ``limit``: largest mean difference of log-probabilities that rounding explains.

    Then score them under ``current``, and with ``base`` under that.
    """
    by_ref: dict[AdapterRef, list[Excerpt]] = {}
    for excerpt in excerpts:
        by_ref.setdefault(excerpt.ref, []).append(excerpt)
    compared: list[tuple[Excerpt, list[float]]] = []
    missing: list[str] = []
    lost: list[Excerpt] = []
    for ref, mine in by_ref.items():
        try:
            scored = score(ref, [e.token_ids for e in mine])
        except PublishError as e:
            missing.append(f"{ref}: {e}")
            lost += mine
            continue
        compared += zip(mine, scored, strict=True)
    gaps: dict[int, list[float]] = {}
    every: list[float] = []
    votes: Counter[str] = Counter(late=0, late_own=0, early=0, early_own=0)
    for excerpt, scores in compared:
        if len(scores) != len(excerpt.token_ids):
            return Audit(error=f"{excerpt.ref}: {len(scores)} scores for {len(excerpt.token_ids)} tokens")
        every += [abs(scores[t] - excerpt.recorded[t]) for t in excerpt.at]
        if not excerpt.exact:
            continue
        gaps.setdefault(excerpt.sequence, []).extend(abs(scores[t] - excerpt.recorded[t]) for t in excerpt.exact)
        mask = torch.zeros(len(scores), dtype=torch.bool, device="cpu")
        mask[excerpt.exact] = True
        mine_, theirs = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (scores, excerpt.recorded))
        votes.update({name: int(n) for name, n in shift_votes(mine_, theirs, mask).items()})
    error = _contradiction(gaps, votes, limit)
    known = [*compared, *((excerpt, excerpt.recorded) for excerpt in lost if excerpt.ref != current)]
    return Audit(
        tokens=len(every),
        gap=fmean(every) if every else None,
        missing="; ".join(missing),
        error=error,
        rescored=rescore(known, score, current, base=base, whole=not lost) if current and known and not error else None,
    )


def rescore(
    compared: Sequence[tuple[Excerpt, list[float]]], score: Score, current: AdapterRef, *, base: bool, whole: bool
) -> AuditedTokens | None:
    """Score excerpts, each with its scores under its own version, under ``current``; None if no server does.

    With ``base`` also under that, where a server has one. Not ``whole``: some have their record in place of scores.
    """
    longest: dict[int, list[int]] = {}
    for excerpt, _ in compared:
        longest[excerpt.sequence] = max(longest.get(excerpt.sequence, []), excerpt.token_ids, key=len)
    older = {e.sequence: longest[e.sequence] for e, _ in compared if e.ref != current}
    try:
        newer = dict(zip(older, score(current, list(older.values())) if older else [], strict=True))
        bare = score(None, list(longest.values())) if base else []
    except PublishError:
        return None
    of_base = dict(zip(longest, bare, strict=True)) if bare else {}
    rows = [
        (
            excerpt.recorded[t],
            excerpt.kept[t],
            own[t],
            own[t] if excerpt.ref == current else newer[excerpt.sequence][t],
            of_base[excerpt.sequence][t] if of_base else 0.0,
        )
        for excerpt, own in compared
        for t in excerpt.at
    ]
    recorded, kept, sampled, now, bare_scores = torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1)
    return AuditedTokens(
        version=current.version,
        at=[excerpt.start + t for excerpt, _ in compared for t in excerpt.at],
        fresh=[excerpt.ref == current and not excerpt.mixed for excerpt, _ in compared for _ in excerpt.at],
        causes=base,
        scores=ServerScores(
            recorded=recorded,
            kept=kept,
            sampled=sampled if whole else None,
            current=now,
            base=bare_scores if of_base else None,
        ),
    )


def _contradiction(gaps: Mapping[int, Sequence[float]], votes: Mapping[str, int], limit: float) -> str:
    """Return the fault, or an empty text. It counts sequences, because a tie between experts spoils single ones."""
    if is_shifted(votes):
        return (
            f"rollout logprobs are shifted by one token: scored by the versions that sampled them {votes['late']} "
            f"tokens have the record of the next one, {votes['early']} that of the one before, "
            f"{votes['late_own']} their own"
        )
    means = [fmean(sequence) for sequence in gaps.values()]
    far = [m for m in means if not m <= limit]
    if len(means) < FEWEST or 2 * len(far) <= len(means):
        return ""
    return (
        f"{len(far)} of {len(means)} sequences have rollout logprobs that the versions that sampled them do not "
        f"confirm: mean |recorded - scored| is {fmean(far):.3g}, limit {limit:g}; tokens, versions or "
        "log-probabilities are shifted, or they were sampled at another temperature or by another policy"
    )


def _merged(audits: Sequence[Audit]) -> Audit | None:
    """Merge several audits into one, with the first error, and scores of a step that measures causes if there are any;
    None for no audits.
    """
    if not audits:
        return None
    tokens = sum(a.tokens for a in audits)
    total = sum(a.tokens * a.gap for a in audits if a.gap is not None)
    scores = [audit.rescored for audit in audits if audit.rescored]
    return Audit(
        adapter=audits[-1].adapter,
        tokens=tokens,
        gap=total / tokens if tokens else None,
        silent_steps=audits[-1].silent_steps,
        took_s=sum(a.took_s for a in audits),
        rescored=max(scores, key=lambda its: its.causes, default=None),
        error=next((a.error for a in audits if a.error), ""),
        missing="; ".join(a.missing for a in audits if a.missing),
    )


class Auditor:
    """Audit batches on rank 0, in a separate thread, with the first of ``servers`` that answers.

    ``limit``: see `audit`, ``kept_caches``: see `choose`. A server accepts sequences of less than ``max_model_len``
    tokens.
    """

    def __init__(
        self, secret: str, limit: float, timeout_s: float, max_model_len: int, kept_caches: bool = False
    ) -> None:
        self._secret, self._limit, self._timeout_s, self._kept_caches = secret, limit, timeout_s, kept_caches
        self._max_tokens = max_model_len - 1
        self._servers: tuple[ServerEndpoint, ...] = ()  # of the newest version
        self._active: dict[str, int] = {}
        self._changed, self._closed = threading.Condition(), False
        self._clients: dict[ServerEndpoint, AdminClient] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._running: list[Future[Audit]] = []
        self._ended: list[Audit] = []
        self._silent_steps = 0

    def activated(self, ref: AdapterRef, servers: tuple[ServerEndpoint, ...]) -> None:
        """``ref`` is active on ``servers``. In the publisher's thread."""
        with self._changed:
            self._servers, self._active[ref.name] = servers, ref.version
            self._changed.notify_all()

    def start(self, ref: AdapterRef, batch: TrainBatch, temperature: float, *, base: bool) -> list[int]:
        """Start the audit of the ``batch`` that trains ``ref``, unless another one is running; with ``base`` (`audit`)
        behind that. Return the numbers of its sequences.
        """
        self._take(wait=False)
        if self._running and not base:
            self._keep(Audit(adapter=ref.name, missing="the audit of an earlier batch is still running"))
            return []
        excerpts = choose(batch, ref.name, ref.version, self._max_tokens, self._kept_caches)
        self._running.append(self._pool.submit(self._audit, ref, excerpts, temperature, base))
        return sorted({excerpt.sequence for excerpt in excerpts})

    def collect(self, name: str, *, wait: bool = False) -> Audit | None:
        """Return the merged audits of ``name`` that ended since its last call, or None.

        With ``wait``, wait for the one in progress. Audits of other adapters stay for their calls.
        """
        self._take(wait=wait)
        ended = [audit for audit in self._ended if audit.adapter == name]
        self._ended = [audit for audit in self._ended if audit.adapter != name]
        return _merged(ended)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def _take(self, *, wait: bool) -> None:
        while self._running and (wait or self._running[0].done()):
            self._keep(self._running.pop(0).result())

    def _keep(self, audit: Audit) -> None:
        self._silent_steps = 0 if audit.tokens else self._silent_steps + 1
        if self._silent_steps and self._silent_steps % QUIET_STEPS == 0:
            log.warning(
                "no token of the last %d batches could be compared with a server: %s",
                self._silent_steps,
                audit.missing or f"no sequence has sampled tokens among its first {self._max_tokens}",
            )
        self._ended.append(replace(audit, silent_steps=self._silent_steps))

    def _audit(self, current: AdapterRef, excerpts: Sequence[Excerpt], temperature: float, base: bool) -> Audit:
        started_s = time.monotonic()
        try:
            ended = self._compared(current, excerpts, temperature, base, started_s + self._timeout_s)
        except Exception as error:  # fault boundary: a comparison that fails is none, and ends no training step
            log.exception("the audit of a batch of %s", current.name)
            ended = Audit(missing=f"{type(error).__name__}: {error}")
        return replace(ended, adapter=current.name, took_s=time.monotonic() - started_s)

    def _compared(
        self, current: AdapterRef, excerpts: Sequence[Excerpt], temperature: float, base: bool, deadline: float
    ) -> Audit:
        for left in self._clients.keys() - set(self._servers):
            self._clients.pop(left).close()

        def score(ref: AdapterRef | None, token_ids: list[list[int]]) -> list[list[float]]:
            if ref == current and self._servers:  # its publish may be in progress
                self._wait_for(current, deadline - time.monotonic())
            reasons, servers = [], self._servers
            first = (ref or current).version % max(1, len(servers))
            for server in (*servers[first:], *servers[:first]):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                client = self._clients.setdefault(server, AdminClient(server, self._secret))
                try:
                    return client.score(str(ref) if ref else None, token_ids, left_s, temperature)
                except PublishError as e:
                    reasons.append(str(e))
            raise PublishError("; ".join(reasons) or f"no server could be queried within {self._timeout_s:g} s")

        return audit(excerpts, score, self._limit, current, base=base)

    def _wait_for(self, ref: AdapterRef, left_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._active.get(ref.name, -1) >= ref.version, left_s)
