"""What the tests of scorers share."""

from __future__ import annotations

import pytest

from areal_lora.tasks.sandbox import fence as sandbox_fence


@pytest.fixture(params=["bubblewrap", "seccomp alone"])
def fence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to fence a scorer that may start processes."""
    if request.param == "seccomp alone":
        monkeypatch.setattr(sandbox_fence.shutil, "which", lambda _: None)
        return request.param
    monkeypatch.setattr(sandbox_fence, "is_root", lambda: False)
    if sandbox_fence.boxed([], network=False, hidden=None, scratch=None) is None:
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    return request.param
