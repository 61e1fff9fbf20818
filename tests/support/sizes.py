"""Sizes of the tests that repeat: those of the suite, and those of the nightly run (``make test-all``)."""

import os

NIGHTLY = os.environ.get("AREAL_LORA_NIGHTLY") == "1"


def size(suite: int, nightly: int) -> int:
    """The number of repetitions in this run. Nothing but such numbers may differ between the two."""
    return nightly if NIGHTLY else suite
