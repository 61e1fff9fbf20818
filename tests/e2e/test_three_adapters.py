"""Three adapters on one base: each ends by itself, and none changes another one's numbers. With a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.e2e.metrics import records
from tests.support.e2e.several_adapters import STEPS, Ended, entries, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RAISES = """
def reward(completion, answer):
    raise ValueError("this reward is broken")
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("three adapters"), "together", entries(*STEPS))


def test_each_adapter_ends_by_itself_and_is_exported(together: Ended) -> None:
    assert together.code == 0, together.output
    for name, steps in STEPS.items():
        mine = [record for record in together.steps if record["adapter"] == name]
        assert [record["step"] for record in mine] == list(range(steps))
        assert (together.folder.adapter_export(name) / "adapter_model.safetensors").exists()
        evals = [r["version"] for r in records(together.folder.path) if r["kind"] == "eval" and r["adapter"] == name]
        assert sorted(evals) == [0, steps]
        assert sorted(together.states[name]) == list(range(steps + 1))
    order = [record["adapter"] for record in together.steps]
    assert order.index("experts") < 6, "no adapter waits for another one to end"


def test_an_adapter_alone_has_the_same_numbers(together: Ended, alone: Ended) -> None:
    """Weights and both moments of every version, bit for bit; one of the others has left after its second step."""
    assert alone.states["attention"] == together.states["attention"]


def test_faults_of_two_adapters_leave_the_third_as_it_is(together: Ended, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(RAISES)
    broken = {
        "reward": {"kind": "function", "path": f"{tmp_path / 'broken.py'}:reward", "workers": 1},
        "sampling": {"prompts_per_step": 16, "n_samples": 2, "max_new_tokens": 2},  # groups wait for retries together
    }
    # Prompts enough that the first step has a gradient.
    far = {"optimizer": {"lr": 2e37}, "sampling": {"prompts_per_step": 8, "n_samples": 4, "max_new_tokens": 16}}
    faulty = run(tmp_path, "faulty", entries(*STEPS, experts=broken, shared=far))
    assert faulty.code not in (0, 1), faulty.output
    assert faulty.states["attention"] == together.states["attention"]
    assert (faulty.folder.adapter_export("attention") / "adapter_model.safetensors").exists()
    log = (faulty.folder.logs / "trainer-0.log").read_text()
    assert "experts has failed at version 0: " in log
    assert "this reward is broken" in log
    assert "shared has failed at version 1: shared@v1 on server server-0" in log
    assert "the probe has logprobs that are not finite" in log
    assert not (faulty.folder.adapter_export("experts")).exists()
