"""The base is evaluated once per problem set, way of asking and way of scoring, whoever has it as version 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.task import EvalSetConfig, FunctionReward, JudgeReward, WordProblemsTask
from areal_lora.errors import RolloutError
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout.channel.channel_messages import EvalResult
from areal_lora.rollout.controller.eval_sets import BaseEvals, ranks_of
from areal_lora.rollout.main import adapter_data
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, CharTokenizer, config
from tests.support.rollout.patient_client import PatientClient
from tests.support.rollout.running import Running

A, B = (AdapterRef(name=name, version=0) for name in ("a", "b"))
PROBLEMS = 40
SAMPLED = EvalSetConfig(name="sampled", temperature=0.5)


def keys(made: Config | None = None, **fields: Any) -> dict[str, str]:
    made = made or config("m")
    adapter: AdapterConfig = made.adapters[0].model_copy(update=fields)
    data = adapter_data(made.model_copy(update={"adapters": [adapter]}), adapter, CharTokenizer())
    return {each.name: each.base_key for each in data.sets if each.base_key is not None}


def sampling(**changes: Any) -> dict[str, Any]:
    return {"sampling": config("m").adapters[0].sampling.model_copy(update=changes)}


def a_set(**changes: Any) -> dict[str, Any]:
    return {"evals": [EvalSetConfig(**{"name": "held-out", "workflow": "single_turn", **changes})]}


def test_ranks_are_places_in_the_sets_that_the_workflow_answers() -> None:
    adapter = config("m").adapters[0]
    sets = [EvalSetConfig(name="own", n=3), EvalSetConfig(name="short", n=2), EvalSetConfig(name="all")]
    plain = sets[2].model_copy(update={"workflow": "single_turn"})

    def ranks(evals: list[EvalSetConfig]) -> list[int]:
        data = adapter_data(config("m"), adapter.model_copy(update={"evals": evals}), CharTokenizer())
        assert {prompt.sample.uid for prompt in data.sets[0].held_out.prompts} <= ranks_of(data.sets).keys()
        return list(ranks_of(data.sets).values())

    assert sorted(ranks(sets)) == list(range(PROBLEMS))
    assert sorted(ranks([*sets[:2], plain])) == [0, 1, 2]


def test_what_an_adapter_is_and_how_it_is_trained_changes_nothing() -> None:
    mine = keys()
    assert list(mine) == ["held-out"]
    for fields in (
        {
            "name": "other",
            "rank": 2,
            "alpha": 1,
            "target_modules": ["linear_fc1"],
            "weight": 3.0,
            "seed": 9,
            "steps": 2,
        },
        {"optimizer": config("m").adapters[0].optimizer.model_copy(update={"lr": 1.0})},
        sampling(n_samples=7, prompts_per_step=3, temperature=0.7, top_k=3),
        a_set(),
    ):
        assert keys(**fields) == mine, fields
    assert set(keys(**a_set(name="other")).values()) == set(mine.values()), "what a set is called"


@pytest.mark.parametrize(
    "fields",
    [
        {"task": WordProblemsTask(n_train=64, n_eval=39)},
        {"reward": FunctionReward(path="m:f")},
        {"reward_weights": [2.0]},
        sampling(max_new_tokens=7),
        sampling(stop=["x"]),
        sampling(timeout_s=4.0),
        a_set(n=5),
        a_set(correct_threshold=0.5),
        a_set(temperature=0.5),
    ],
)
def test_what_an_answer_or_its_score_depends_on_counts(fields: dict[str, Any]) -> None:
    assert set(keys(**fields)) == {"held-out"}
    assert keys(**fields) != keys()


def test_a_measure_is_of_problems_answers_and_rewards_and_not_of_limits_and_places() -> None:
    def measures(**fields: Any) -> str:
        adapter = config("m").adapters[0].model_copy(update=fields)
        (only,) = adapter_data(config("m"), adapter, CharTokenizer()).sets
        return only.measure

    function, same = FunctionReward(path="m:f"), FunctionReward(path="m:f", workers=3)
    assert measures() == measures(**sampling(timeout_s=4.0)) == measures(init_from="folder", seed=7)
    assert measures(reward=function) == measures(reward=same)
    here, there = (FunctionReward(path=f"/jobs/{job}/r.py:f", timeout_s=job) for job in (1, 2))
    assert measures(reward=here) == measures(reward=there) != measures(reward=function)
    first, second = (JudgeReward(url=f"http://n{job}:8000/v1", model="m", prompt="p") for job in (1, 2))
    assert measures(reward=first) == measures(reward=second)
    assert measures(reward=first) != measures(reward=first.model_copy(update={"model": "n"}))
    assert keys(reward=here) != keys(reward=there), "the base's result is that of one place"
    changed = [{"reward": function}, a_set(n=5), a_set(correct_threshold=0.5), sampling(max_new_tokens=7)]
    assert len({measures(), *(measures(**fields) for fields in changed)}) == 5


def test_another_base_and_an_adapter_that_begins_elsewhere() -> None:
    assert keys(config("other")) != keys()
    assert keys(init_from="folder") == {}, "its version 0 is not the base"


def test_answers_that_are_drawn_at_random_depend_on_the_seed_and_on_the_name_of_the_set() -> None:
    drawn = keys(evals=[SAMPLED])
    assert keys(evals=[SAMPLED], seed=3, name="other") == drawn, "run.seed is 3"
    assert keys(evals=[SAMPLED], seed=4) != drawn
    assert set(keys(evals=[SAMPLED.model_copy(update={"name": "again"})]).values()) != set(drawn.values())


# ---------------------------------------------------------------- once


def record(adapter: str = "a") -> EvalRecord:
    return EvalRecord(adapter=adapter, version=0, step=0, accuracy=0.25, reward_mean=0.5, n=8, wall_s=3.0)


class Asked:
    """Counts; answers after a turn of the loop."""

    def __init__(self, *answers: EvalRecord | RolloutError) -> None:
        self.answers, self.times = list(answers), 0

    async def __call__(self) -> EvalRecord:
        self.times += 1
        await asyncio.sleep(0.01)
        answer = self.answers.pop(0)
        if isinstance(answer, RolloutError):
            raise answer
        return answer


def test_two_that_ask_together_have_one_result() -> None:
    asked = Asked(record())

    async def main() -> list[EvalRecord]:
        base = BaseEvals()
        return await asyncio.gather(*(base.once("key", ref, asked) for ref in (A, B)))

    mine, other = asyncio.run(main())
    assert asked.times == 1
    assert (mine.adapter, mine.measured_with, mine.wall_s, mine.accuracy) == ("a", "", 3.0, 0.25)
    assert (other.adapter, other.measured_with, other.wall_s, other.accuracy) == ("b", "a", 0.0, 0.25)


def test_other_keys_do_not_wait() -> None:
    async def main() -> None:
        base, held = BaseEvals(), asyncio.Event()

        async def hangs() -> EvalRecord:
            await held.wait()
            return record()

        first = asyncio.create_task(base.once("key", A, hangs))
        async with asyncio.timeout(120):
            assert (await base.once("other", B, Asked(record("b")))).measured_with == ""
        held.set()
        await first

    asyncio.run(main())


def test_an_error_and_a_cancelled_evaluation_leave_it_to_the_next() -> None:
    async def main() -> None:
        base, hangs = BaseEvals(), asyncio.Event()

        async def cut_off() -> EvalRecord:
            await hangs.wait()
            return record()

        first = asyncio.create_task(base.once("key", A, cut_off))
        asked = Asked(RolloutError("gone"), record())
        others = [asyncio.create_task(base.once("key", ref, asked)) for ref in (B, A)]
        await asyncio.sleep(0.01)
        first.cancel()
        second, third = await asyncio.gather(*others, return_exceptions=True)
        assert (str(second), third) == ("gone", record())

    asyncio.run(main())


def test_a_later_process_reads_it_and_measures_again_what_it_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    asyncio.run(BaseEvals(folder).once("key", A, Asked(record())))
    asked = Asked(record("b"))
    assert asyncio.run(BaseEvals(folder).once("key", A, asked)) == record()
    assert asyncio.run(BaseEvals(folder).once("key", B, asked)).measured_with == "a"
    assert asked.times == 0
    (folder.base_evals / "key.json").write_bytes(b'{"adapter": "a"')
    assert asyncio.run(BaseEvals(folder).once("key", B, asked)).measured_with == ""
    assert asked.times == 1
    assert str(folder.base_evals / "key.json") in caplog.text
    assert [path.name for path in (folder.base_evals / "key.json").parent.iterdir()] == ["key.json"]


def test_a_disk_that_takes_nothing_costs_only_the_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    (folder.base_evals / "key.json").parent.write_text("a file in the way")
    base, asked = BaseEvals(folder), Asked(record())

    async def main() -> None:
        await base.once("key", A, asked)
        assert (await base.once("key", B, asked)).measured_with == "a"

    asyncio.run(main())
    assert "after a restart the base is evaluated again" in caplog.text


# ---------------------------------------------------------------- a whole controller


def asked_problems(server: FakeServer) -> int:
    return sum(r.get("pin_version", False) for r in server.requests)


def evaluated(run: Running, *names: str, client: PatientClient | None = None) -> dict[str, EvalResult]:
    client = client or run.client
    for name in names:
        client.request_eval(AdapterRef(name=name, version=0), "e")
    return {name: client.wait_eval(AdapterRef(name=name, version=0), "e") for name in names}


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lora.rollout.main.load_tokenizer", lambda *_, **__: CharTokenizer())


@pytest.mark.usefixtures("letters")
def test_a_controller_asks_once_for_all_adapters_of_a_task_also_for_those_that_join(
    controller: Callable[..., Running],
) -> None:
    server = FakeServer()
    other = {"task": WordProblemsTask(n_train=64, n_eval=11)}
    run = controller(server, twins={"twin": {"rank": 2}, "apart": other}, eta=0)
    for name in (NAME, "twin", "apart"):
        run.activate(0, name)
    found = evaluated(run, NAME, "twin", "apart")
    assert asked_problems(server) == PROBLEMS + 11
    assert {name: each.sets[0].n for name, each in found.items()} == {NAME: 40, "twin": 40, "apart": 11}
    assert run.join("late") == ""
    run.activate(0, "late")
    found |= evaluated(run, "late")
    assert asked_problems(server) == PROBLEMS + 11
    records = [each.sets[0] for each in found.values()]
    assert [record.adapter for record in records] == [NAME, "twin", "apart", "late"]
    took = [name for name, each in found.items() if not each.sets[0].measured_with]
    assert sorted(took) in (sorted([NAME, "apart"]), sorted(["twin", "apart"]))
    assert [record.wall_s == 0 for record in records] == [record.adapter not in took for record in records]
    assert records[3].figures().endswith(f"measured with {records[3].measured_with}")
    # A later version is the adapter's own.
    run.client.next_batch("twin", 0)
    run.activate(1, "twin")
    run.client.request_eval(AdapterRef(name="twin", version=1), "e")
    assert run.client.wait_eval(AdapterRef(name="twin", version=1), "e").sets[0].measured_with == ""
    assert asked_problems(server) == 2 * PROBLEMS + 11


def test_where_the_first_has_no_result_the_next_is_asked(controller: Callable[..., Running]) -> None:
    """Version 0 of one adapter is gone; the other one's is still served."""
    server = FakeServer()
    run = controller(server, twins={"twin": {}}, eta=0)
    run.announce(0)
    run.activate(0, "twin")
    run.client.request_eval(AdapterRef(name=NAME, version=0), "e")
    assert "version_retired" in run.client.wait_eval(AdapterRef(name=NAME, version=0), "e").failed["held-out"]
    assert evaluated(run, "twin")["twin"].sets[0].measured_with == ""


def test_another_trainer_gets_the_result_of_a_version_that_no_server_has_any_more(
    controller: Callable[..., Running],
) -> None:
    server = FakeServer()
    run = controller(server, twins={"twin": {}}, eta=0)
    for name in (NAME, "twin"):
        run.activate(0, name)
    first = evaluated(run, NAME)[NAME].sets[0]
    server.models.clear()
    resumed = PatientClient(lambda: run.endpoint, read_secret(RunFolder(run.folder)))
    try:
        resumed.hello({NAME: 0, "twin": 0}, {})
        for name in (NAME, "twin"):
            resumed.announce(AdapterRef(name=name, version=0), {"server-0": server.url})
        again = evaluated(run, NAME, "twin", client=resumed)
        assert again[NAME].sets[0] == first
        assert again["twin"].sets[0].measured_with == NAME
    finally:
        resumed.close()
