"""Adapters on one base: each ends by itself, two of them with a fault, and none changes another one's numbers."""

from __future__ import annotations

import pytest

from areal_lora.checkpoint.recover import pick_version
from areal_lora.config.recorded import read_config
from tests.support.e2e.metrics import records
from tests.support.e2e.several_adapters import STEPS, Ended, entries, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RAISES = """
def reward(completion, answer):
    raise ValueError("this reward is broken")
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The three adapters, and two with faults: a reward that raises, and weights that are not finite after a step."""
    root = tmp_path_factory.mktemp("three adapters")
    (root / "broken.py").write_text(RAISES)
    broken = {
        "name": "broken",
        "reward": {"kind": "function", "path": f"{root / 'broken.py'}:reward", "workers": 1},
        "sampling": {"prompts_per_step": 16, "n_samples": 2, "max_new_tokens": 2},  # groups wait for retries together
    }
    # Prompts enough that the first step has a gradient.
    sampling = {"prompts_per_step": 8, "n_samples": 4, "max_new_tokens": 16}
    far = {"name": "far", "optimizer": {"lr": 2e37}, "sampling": sampling}
    faulty = entries("experts", "shared", experts=broken, shared=far)
    return run(root, "together", [*entries(*STEPS), *faulty])


def test_each_adapter_ends_by_itself_and_is_exported(together: Ended) -> None:
    lasts: list[bool] = []
    for name, steps in STEPS.items():
        mine = [record for record in together.steps if record["adapter"] == name]
        assert [record["step"] for record in mine] == list(range(steps))
        assert (together.folder.adapter_export(name) / "adapter_model.safetensors").exists()
        evals = [r for r in records(together.folder.path) if r["kind"] == "eval" and r["adapter"] == name]
        assert sorted(r["version"] for r in evals) == [0, steps]
        assert sorted(together.states[name]) == list(range(steps + 1))
        # All versions are kept; of equal ones the newest is the best.
        best = max((r["accuracy"], r["reward_mean"], r["version"]) for r in evals)[-1]
        assert pick_version(together.folder, read_config(together.folder), "best", name).ref.version == best
        lasts.append(best == steps)
    assert any(lasts), "a last version is the best one, whose checkpoint was written before its evaluation"
    order = [record["adapter"] for record in together.steps if record["adapter"] in STEPS]
    assert order.index("experts") < 6, "no adapter waits for another one to end"


def test_an_adapter_alone_has_the_same_numbers(together: Ended, alone: Ended) -> None:
    """Weights and both moments of every version, bit for bit.

    Of the others two have failed at versions 0 and 1, and one has left after its second step.
    """
    assert alone.states["attention"] == together.states["attention"]


def test_faults_of_two_adapters_have_their_reasons_and_no_export(together: Ended) -> None:
    assert together.code not in (0, 1), together.output
    log = (together.folder.logs / "trainer-0.log").read_text()
    assert "broken has failed at version 0: " in log
    assert "this reward is broken" in log
    assert "far has failed at version 1: far@v1 on server server-0" in log
    assert "the probe has logprobs that are not finite" in log
    assert not any(together.folder.adapter_export(name).exists() for name in ("broken", "far"))
