"""The boundary to the SDK of a tracker: what it raises becomes one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from areal_lora.errors import ArealLoraError, EnvironmentError_
from areal_lora.obs.tracking.public_config import masked_text

LONGEST = 300


@contextmanager
def speaking_to(tracker: str) -> Iterator[None]:
    """Raise EnvironmentError_ in one line, without keys, for whatever the SDK raises."""
    try:
        yield
    except ArealLoraError:
        raise
    except Exception as error:  # fault boundary: errors of the SDK, its transport, its server  # noqa: BLE001
        reason = masked_text(" ".join(str(error).split()))[:LONGEST] or type(error).__name__
        fix = "check key, name and connection; the same command continues where it stopped, the run is not affected"
        raise EnvironmentError_(f"{tracker}: {reason} (fix: {fix})") from None


def require(module: str, package: str, extra: str) -> None:
    """Raise EnvironmentError_ where ``module`` is not installed; a folder of that name in the working folder is not."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise EnvironmentError_(
            f"this environment has no package {package} (fix: pip install 'areal-lora[{extra}]', or {package} itself)"
        )
