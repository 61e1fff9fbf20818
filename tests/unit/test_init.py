"""The public names: what the docstring shows works, importing the package is cheap, and one path starts a run."""

import ast
import doctest
import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import areal_lora
from areal_lora.errors import ExitCode
from areal_lora.launcher import run as running
from areal_lora.launcher.restarts import RunEnd
from areal_lora.library import runs
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.records import step_record


def finished_here(run_folder: RunFolder) -> RunEnd:
    """A run of two steps, without its processes."""
    with MetricsWriter(run_folder) as metrics:
        for step, reward in enumerate((0.25, 0.5)):
            metrics.write(step_record(step=step, version=step, time_s=step, adapter="gsm8k", reward_mean=reward))
    run_folder.adapter_checkpoints("gsm8k").joinpath("v000002").mkdir(parents=True)
    write_summary(run_folder, wall_s=1.0, adapters={"gsm8k": "adapter"}, report_path="report")
    return RunEnd(code=ExitCode.DONE)


def test_the_example_of_the_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "run_local", lambda config, plan, out: finished_here(plan.run_folder))
    for name in ("Console", "run_console"):
        monkeypatch.setattr(runs, name, partial(Console, quiet=True))
    [example] = doctest.DocTestFinder().find(areal_lora, "areal_lora", globs={})[:1]
    result = doctest.DocTestRunner().run(example)
    assert (result.attempted, result.failed) == (4, 0)


@pytest.mark.parametrize("name", areal_lora.__all__)
def test_every_public_name_is_there_and_is_its_modules(name: str) -> None:
    value = getattr(areal_lora, name)
    assert name in dir(areal_lora)
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_type_checkers_see_the_same_names() -> None:
    assert areal_lora.__file__ is not None
    tree = ast.parse(Path(areal_lora.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == sorted(areal_lora.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(areal_lora, name)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        _ = areal_lora.trane  # type: ignore[attr-defined]


LOADED = """
import json, sys
before = set(sys.modules)
import areal_lora
cheap = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
for name in areal_lora.__all__: getattr(areal_lora, name)
print(json.dumps([cheap, sorted({m.partition(".")[0] for m in sys.modules})]))
"""


def test_importing_loads_nothing_and_no_name_loads_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    cheap, everything = json.loads(done.stdout)
    assert set(cheap) <= {"areal_lora", *sys.stdlib_module_names}
    assert {"torch", "vllm", "megatron"}.isdisjoint(everything)
