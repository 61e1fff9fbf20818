"""Whatever an SDK raises is one line without keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.errors import ConfigError, EnvironmentError_, ExitCode
from areal_lora.obs.tracking.tracker import require, speaking_to


def test_errors_become_one_line_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with pytest.raises(EnvironmentError_) as caught, speaking_to("MLflow"):
        raise RuntimeError("401 at https://me:secret@host/api\nkey 0123456789abcdef is refused")
    text = str(caught.value)
    assert text.startswith("MLflow: 401 at https://host/api key (left out) is refused (fix: ")
    assert caught.value.exit_code == ExitCode.MISSING
    assert caught.value.__suppress_context__, "the original error would show the key in a traceback"


def test_an_error_without_a_text_is_named() -> None:
    with pytest.raises(EnvironmentError_, match=r"^W&B: TimeoutError \(fix"), speaking_to("W&B"):
        raise TimeoutError


def test_errors_of_this_package_stay_as_they_are() -> None:
    with pytest.raises(ConfigError), speaking_to("W&B"):
        raise ConfigError("a", "b")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nowhere_at_all").mkdir()
    monkeypatch.syspath_prepend(tmp_path)  # Python takes such a folder for a package
    for module in ("not_at_all", "nowhere_at_all"):
        with pytest.raises(EnvironmentError_, match=r"no package thing \(fix: pip install 'areal-lora\[extra\]'"):
            require(module, "thing", "extra")
    require("json", "json", "extra")
