"""Reasons for refusing a publish: the words of ``ManifestError.reason``."""

from __future__ import annotations

from enum import StrEnum


class RefusalReason(StrEnum):
    MALFORMED = "malformed"  # the manifest itself cannot be read
    WRONG_RUN = "wrong_run"
    WRONG_BASE = "wrong_base"
    STALE_VERSION = "stale_version"  # older than the current one, or a parent that is not older
    DUPLICATE = "duplicate"  # the current version again (a server acknowledges it again), or one name twice
    UNKNOWN_LAYOUT = "unknown_layout"  # a digest of a layout that was never sent to this server
    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    PREFIX = "prefix"
    SHAPE = "shape"
    DTYPE = "dtype"
    RANK = "rank"
    ALPHA = "alpha"
    TARGETS = "targets"
    SIZE = "size"
    HASH = "hash"
    NON_FINITE = "non_finite"
    SLOT = "slot"  # no free adapter slot on the server yet: running requests hold them
    WIRE = "wire"  # the transfer broke or missed its deadline
    WRITE = "write"  # the engine failed to take the tensors
