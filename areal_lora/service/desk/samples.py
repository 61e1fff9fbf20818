"""Samples that were acknowledged and that no client has fetched: what they ask for, over restarts of the service.

What came of a sample is not kept. After a restart it is sampled again, which no one can see: with a seed it is the
same, and without one it is as good as the one that no client got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_lora.service.desk.books import Books
from areal_lora.service.refused import Refused

UNFETCHED_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """``ask`` is the face's own."""

    sample: str
    tenant: str
    fingerprint: str
    ask: bytes


def keep(books: Books, tenant: str, sampler: str, sample: str, fingerprint: str, ask: bytes) -> None:
    """Take a sample of the tenant's sampling session, or find it taken. Raises Refused."""
    books.sampler(tenant, sampler)
    row = books.row("SELECT fingerprint FROM samples WHERE sample = ?", sample)
    if row is None:
        books.insert(
            "samples", sample=sample, tenant=tenant, sampler=sampler, fingerprint=fingerprint, ask=ask, at_s=books.now_s
        )
    elif row[0] != fingerprint:
        raise Refused(422, "seq_id", "another request came under this number", "use a new number")


def kept(books: Books) -> list[KeptSample]:
    """Oldest first."""
    found = books.rows("SELECT sample, tenant, fingerprint, ask FROM samples ORDER BY rowid")
    return [KeptSample(sample=row[0], tenant=row[1], fingerprint=row[2], ask=row[3]) for row in found]


def drop(books: Books, samples: Iterable[str]) -> None:
    """Forget samples that are no longer needed, and those that no one has fetched for a day."""
    for sample in samples:
        books.do("DELETE FROM samples WHERE sample = ?", sample)
    books.do("DELETE FROM samples WHERE at_s < ?", books.now_s - UNFETCHED_S)
