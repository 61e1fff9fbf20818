"""A process that stands still for seconds is not dead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal_lora.config.models import WeightSyncConfig
from tests.support.weight_sync import PATIENT


@pytest.fixture(scope="package", autouse=True)
def patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightSyncConfig, "ping_s", PATIENT)
        yield
