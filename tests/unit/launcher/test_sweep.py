"""A sweep's plan, its decisions and what the run folder has after a restart. Nothing runs."""

from __future__ import annotations

import io
import math
import random
import shlex
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.recorded import with_joined, write_config
from areal_lora.errors import ConfigError
from areal_lora.launcher import sweep as sweeps
from areal_lora.launcher.sweep import Halving, Measure, Rung, Sweep, plan_rungs, plan_sweep
from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import Record, ResumeRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder, read_desired
from areal_lora.types import AdapterPhase
from tests.support.launcher.command import configs
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import evaluation, state

FILES = configs("gsm8k_grpo_megatron_lora_moe", "embedded")[1::2]
RATES = "adapters.0.optimizer.lr=[1e-4,3e-4,0.001,0.003]"


@cache
def planned(*overrides: str, **options: Any) -> tuple[Config, Sweep]:
    """Rungs of four trials: two continue after step 2, one after step 4, of 16."""
    return plan_sweep(FILES, ["run.steps=16", *(overrides or [RATES])], **{"rungs": "1/8,1/4"} | options)


def step(key: str, index: int, reward: float) -> Record:
    return step_record(step=index, version=index, time_s=float(index), adapter=key, reward_mean=reward)


# ---------------------------------------------------------------- the plan


def test_trials_are_the_product_of_the_lists_and_differ_in_nothing_else() -> None:
    config, sweep = planned("adapters.gsm8k.optimizer.lr=[1e-4,3e-4]", "adapters.0.rank=[4, 8]", "cluster.threads=2")
    assert [trial.name for trial in sweep.trials] == [
        "lr-1e-4-rank-4",
        "lr-1e-4-rank-8",
        "lr-3e-4-rank-4",
        "lr-3e-4-rank-8",
    ]
    assert sweep.trials[2].overrides == ("adapters.gsm8k.optimizer.lr=3e-4", "adapters.0.rank=4")
    assert [(a.name, a.optimizer.lr, a.rank) for a in config.adapters] == [
        ("lr-1e-4-rank-4", 1e-4, 4),
        ("lr-1e-4-rank-8", 1e-4, 8),
        ("lr-3e-4-rank-4", 3e-4, 4),
        ("lr-3e-4-rank-8", 3e-4, 8),
    ]
    assert config.cluster.threads == 2
    same = [adapter.model_copy(update={"name": "", "rank": 1, "optimizer": None}) for adapter in config.adapters]
    assert same == same[:1] * 4
    assert sweep.command[-2:] == ("run.steps=16", "cluster.threads=2")


def test_trials_of_other_kinds_share_the_other_overrides() -> None:
    config, _ = planned("adapters.0.algorithm.kind=[grpo,dapo,gspo]", "adapters.0.algorithm.kl_coef=0.01")
    assert [(a.algorithm.kind, a.algorithm.kl_coef) for a in config.adapters] == [
        ("grpo", 0.01),
        ("dapo", 0.01),
        ("gspo", 0.01),
    ]


def test_the_launched_run_has_room_for_all_trials_and_no_adapter_of_its_own() -> None:
    config, sweep = planned("adapters.0.target_modules=[[linear_qkv],[linear_proj]]")
    run = sweeps.launched(config, sweep)
    assert (run.adapters, run.rollout.max_adapters) == ([], 2)
    assert run.service is not None
    assert run.service.target_modules == ["linear_proj", "linear_qkv"]


def test_the_configuration_of_a_trial_alone_is_that_of_its_overrides(tmp_path: Path) -> None:
    """As the run reads it: from the desired state beside the recorded configuration."""
    config, sweep = planned("adapters.0.algorithm.kind=[grpo,gspo]", RATES, f"run.root={tmp_path}")
    folder = RunFolder(tmp_path)
    write_config(folder, sweeps.launched(config, sweep))
    sweeps.write_sweep(folder, sweep)
    Halving(folder, LiveConsole(folder, {}))
    joined = with_joined(sweeps.launched(config, sweep), folder).adapters
    for trial, adapter in zip(sweep.trials, joined, strict=True):
        [alone] = sweeps.load_config(FILES, ["run.steps=16", *trial.overrides]).adapters
        assert adapter.model_copy(update={"name": alone.name}) == alone


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("adapters.0.optimizer.lr=[0.5,0.25]", ["lr-0_5", "lr-0_25"]),
        ("adapters.0.init_from=[/a/B,/c]", ["init_from-_a_b", "init_from-_c"]),
        ("adapters.0.init_from=[/a.b,/a b]", ["trial-1", "trial-2"]),
        (f"adapters.0.init_from=[/{'a' * 70},/c]", ["trial-1", "trial-2"]),
        ("adapters.0.algorithm.drop_uniform=[true,false]", ["drop_uniform-true", "drop_uniform-false"]),
    ],
)
def test_names_are_those_of_adapters(override: str, names: list[str]) -> None:
    assert [trial.name for trial in planned(override)[1].trials] == names


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["run.seed=3"], "give 1 different combinations of 1"),
        (["adapters.0.rank=[4]"], "give 1 different"),
        (["adapters.0.rank=[4,4,8]"], "give 2 different combinations of 3"),
        (["adapters.0.optimizer.lr=[1e-4,0.0001,1.0e-4]"], "give 1 different combinations of 3"),
        (["adapters.0.rank=[]"], "give 0 different"),
        (["adapters.0.seed=[1,2]"], r"adapters\.0\.seed: trials share it"),
        (["adapters.0.steps=[4,8]"], r"adapters\.0\.steps: trials share it"),
        (["adapters.0.task.n_eval=[4,8]"], r"adapters\.0\.task: trials share it"),
        (["adapters.0.rnk=[4,8]"], "unknown key"),
        (["adapters.0.rank=[4,-8]"], "-8 is not allowed"),
        ([RATES, "service={}"], "one adapter and no service"),
    ],
)
def test_what_cannot_be_compared_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        planned(*overrides)


def test_evaluations_must_exist_before_the_end() -> None:
    with pytest.raises(ConfigError, match=r"eval\.every_steps"):
        planned(RATES, "eval.every_steps=0", by=Measure.EVALUATION)
    assert planned(RATES, "eval.every_steps=3", by=Measure.EVALUATION)[1].rungs == (Rung(3, 2), Rung(6, 1))


def test_by_default_one_trial_remains_after_a_quarter_of_the_steps() -> None:
    assert plan_rungs(8, 64) == (Rung(4, 4), Rung(8, 2), Rung(16, 1))
    assert plan_rungs(2, 64) == (Rung(16, 1),)
    for halvings in range(1, 6):
        cost, before, made = 0.0, 0, 1 << halvings
        for rung in plan_rungs(made, 1 << 12):
            cost += made * (rung.step - before)
            assert rung.keep == made / 2
            before, made = rung.step, rung.keep
        assert made == 1
        assert (cost + (1 << 12) - before) / (1 << 12) == 1 + 0.25 * halvings
    assert [rung.keep for rung in plan_rungs(13, 1 << 12)] == [7, 4, 2, 1]


def test_rungs_of_short_runs_are_merged_and_lie_before_the_end() -> None:
    assert plan_rungs(8, 4) == (Rung(1, 2), Rung(2, 1))
    assert plan_rungs(8, 16, earliest=4) == (Rung(4, 4), Rung(6, 2), Rung(8, 1)), "trials share the answers before 4"
    assert plan_rungs(4, 16, earliest=4) == (Rung(4, 2), Rung(8, 1))
    assert plan_rungs(2, 8, earliest=4) == (Rung(4, 1),)
    assert plan_rungs(8, 64, earliest=4) == plan_rungs(8, 64)
    assert plan_rungs(8, 16, [Fraction(1, 8)], earliest=4) == (Rung(2, 4),), "as given"
    assert plan_rungs(4, 1) == ()
    assert plan_rungs(3, 10, [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)]) == (Rung(3, 2), Rung(5, 1))
    assert plan_rungs(4, 10, [Fraction(9, 10)], every=4) == ()
    for wrong in ("1/2,1/4", "1", "0", "1/4,0.25", "1/x", "1/0", "-1/4"):
        with pytest.raises(ConfigError, match="--rungs"):
            planned(RATES, rungs=wrong)
    assert planned(RATES, rungs="0.25,1/2")[1].rungs == (Rung(4, 2), Rung(8, 1))


# ---------------------------------------------------------------- halving


def curves(sweep: Sweep, rng: random.Random, steps: int) -> dict[str, list[float]]:
    return {trial.key: [rng.random() for _ in range(steps)] for trial in sweep.trials}


def test_the_worse_half_by_the_mean_of_the_newer_half_of_the_window_stops() -> None:
    """Against a plain loop over the curves."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    sweep = planned(RATES, "adapters.0.rank=[4,8]")[1]
    rewards = curves(sweep, rng, 16)
    written = [step(key, n, values[n]) for key, values in rewards.items() for n in range(16)]
    rng.shuffle(written)  # adapters are ahead of each other
    remaining, start = list(rewards), 0
    for rung in sweep.rungs:
        decision = sweeps.decide(sweep, rung, written)
        middle = (start + rung.step) // 2
        means = {key: math.fsum(rewards[key][middle : rung.step]) / (rung.step - middle) for key in remaining}
        assert decision.scores == pytest.approx(means, rel=1e-12)
        remaining = sorted(remaining, key=means.__getitem__)[-rung.keep :]
        sweep, start = sweep.with_decision(decision), rung.step
        assert set(sweep.remaining) == set(remaining)
    assert len(sweep.decisions) == len(sweep.rungs)


def test_evaluations_decide_where_they_are_wanted() -> None:
    sweep = planned(RATES, "eval.every_steps=3", by=Measure.EVALUATION)[1]
    keys = [trial.key for trial in sweep.trials]
    written: list[Record] = [step(key, n, n * 0.1) for n, key in enumerate(keys)]
    for n, key in enumerate(keys):
        written += [evaluation(key, version, (4 - n) / 10 if version <= 3 else n / 10) for version in (0, 6, 3)]
    decision = sweeps.decide(sweep, sweep.rungs[0], written)
    assert list(decision.scores.values()) == [0.4, 0.3, 0.2, 0.1], "version 6 comes after the rung"
    assert decision.stopped == (keys[2], keys[3])


def test_of_equal_trials_the_first_continues_and_failed_ones_never_do() -> None:
    sweep = planned()[1]
    one, two, three, four = [trial.key for trial in sweep.trials]
    equal: list[Record] = [step(key, 0, 0.5) for key in (four, three, two, one)]
    assert sweeps.decide(sweep, sweep.rungs[0], equal).stopped == (three, four)
    failed = [state(key, AdapterPhase.FAILED, 1, 1.0, "not finite") for key in (one, two, three)]
    assert sweeps.decide(sweep, sweep.rungs[0], equal + failed).stopped == (one, two, three)
    again = ResumeRecord(version=0, time_s=2.0, adapter=one)
    assert sweeps.decide(sweep, sweep.rungs[0], [*equal, *failed, again]).stopped == (two, three)
    everyone = [*failed, state(four, AdapterPhase.FAILED, 1, 1.0)]
    assert sweeps.decide(sweep, sweep.rungs[0], equal + everyone).stopped == (two, three, four), (
        "its fault ends the run"
    )


def test_a_trial_whose_version_had_retired_is_scored_by_the_newer_one_that_was_evaluated() -> None:
    sweep = planned(RATES, "eval.every_steps=3", by=Measure.EVALUATION)[1]
    keys = [trial.key for trial in sweep.trials]
    measured = [(key, version, (version + n) / 20) for n, key in enumerate(keys) for version in (0, 3 + n, 9)]
    written = [evaluation(*one) for one in measured]
    assert sweeps.measure(sweep, written, 3) == {key: (3 + 2 * n) / 20 for n, key in enumerate(keys)}
    assert sweeps.measure(sweep, written) == {key: (9 + n) / 20 for n, key in enumerate(keys)}


# ---------------------------------------------------------------- the run folder


class Launched:
    """The run folder of a sweep, and launchers of it one after another."""

    def __init__(self, path: Path, sweep: Sweep, config: Config) -> None:
        self.folder = RunFolder(path)
        path.mkdir()
        write_config(self.folder, sweeps.launched(config, sweep))
        sweeps.record_sweep(self.folder, sweep)
        self.output = io.StringIO()
        self.start()

    def start(self) -> None:
        self.console = LiveConsole(self.folder, {}, Console(file=self.output, width=500))
        self.halving = Halving(self.folder, self.console)
        self.console.start()

    def write(self, records: Iterable[Record]) -> None:
        with MetricsWriter(self.folder) as writer:
            for record in records:
                writer.write(record)
        self.console.tick()
        self.halving.look()

    @property
    def phases(self) -> dict[str, str]:
        return {adapter.key: str(adapter.phase) for adapter in read_desired(self.folder).adapters}

    @property
    def sweep(self) -> Sweep:
        found = sweeps.read_sweep(self.folder)
        assert found is not None
        return found


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    config, sweep = planned()
    return Launched(tmp_path / "run", sweep, config)


def test_a_rung_is_decided_once_all_have_reached_it(launched: Launched) -> None:
    one, two, three, four = [trial.key for trial in launched.sweep.trials]
    assert set(launched.phases.values()) == {"active"}
    assert read_desired(launched.folder).closed, "the run ends with its trials"
    launched.write(step(key, n, 0.1) for key in (one, two, three) for n in range(3))
    assert launched.sweep.decisions == ()
    launched.write([step(four, 0, 0.9), step(four, 1, 0.9)])
    assert launched.phases == {one: "active", two: "deleted", three: "deleted", four: "active"}
    assert f"stops: {two}, {three}" in launched.output.getvalue()
    assert launched.sweep.decisions[0].scores[four] == 0.9
    launched.write([step(one, 3, 0.1), state(four, AdapterPhase.FAILED, 2, 9.0, "not finite")])
    assert [decision.stopped for decision in launched.sweep.decisions] == [(two, three), (four,)]
    assert launched.sweep.remaining == (one,)


def test_a_launcher_that_starts_again_makes_the_same_decisions(launched: Launched) -> None:
    one, two, three, four = [trial.key for trial in launched.sweep.trials]
    launched.write(step(key, n, reward) for key, reward in zip((one, two, three, four), (4, 3, 2, 1)) for n in (0, 1))
    decided = launched.sweep
    assert decided.remaining == (one, two)
    # The trainer repeats the steps with other answers, by which others would stop.
    launched.start()
    back = [ResumeRecord(version=0, time_s=9.0, adapter=key) for key in (one, two)]
    launched.write([*back, *(step(one, n, 0.0) for n in range(4)), *(step(two, n, 9.0) for n in range(4))])
    assert launched.sweep.decisions[0] == decided.decisions[0]
    assert launched.sweep.remaining == (two,)


def test_a_kill_between_a_decision_and_its_effect_changes_nothing(launched: Launched) -> None:
    one, two, three, four = [trial.key for trial in launched.sweep.trials]
    decision = sweeps.RungDecision(step=2, scores={}, stopped=(one, two))
    sweeps.write_sweep(launched.folder, launched.sweep.with_decision(decision))
    assert set(launched.phases.values()) == {"active"}
    launched.start()
    assert launched.phases == {one: "deleted", two: "deleted", three: "active", four: "active"}
    before = launched.folder.desired.stat().st_ino
    launched.start()
    assert launched.folder.desired.stat().st_ino == before, "nothing is written twice"


def test_the_folder_keeps_its_sweep(launched: Launched) -> None:
    decided = launched.sweep.with_decision(sweeps.RungDecision(step=2, scores={}, stopped=()))
    sweeps.write_sweep(launched.folder, decided)
    sweeps.record_sweep(launched.folder, planned()[1])
    assert launched.sweep == decided
    written_otherwise = planned("adapters.gsm8k.optimizer.lr=[0.0001,0.0003,1e-3,3.0e-3]")[1]
    assert [trial.key for trial in written_otherwise.trials] != [trial.key for trial in decided.trials]
    sweeps.record_sweep(launched.folder, written_otherwise)
    assert launched.sweep == decided, "its adapters keep their names"
    for other in (
        planned("adapters.0.optimizer.lr=[3e-4,1e-4,0.001,0.003]")[1],
        planned("adapters.0.optimizer.lr=[1e-4,3e-4,0.001,0.004]")[1],
        planned(rungs="1/8,1/2")[1],
        planned(by=Measure.EVALUATION)[1],
    ):
        with pytest.raises(ConfigError, match="a sweep of other trials"):
            sweeps.record_sweep(launched.folder, other)
    launched.folder.sweep.write_text("{")
    with pytest.raises(ConfigError, match="it is no sweep"):
        sweeps.read_sweep(launched.folder)


def test_a_run_without_a_sweep_has_no_desired_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    Halving(folder, LiveConsole(folder, {})).look()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the result


def result(launched: Launched) -> str:
    output = io.StringIO()
    write_summary(launched.folder, wall_s=1.0, adapters={}, report_path=launched.folder.report)
    sweeps.print_result(launched.folder, Console(file=output, width=500))
    return output.getvalue()


def finish(launched: Launched) -> None:
    one, two, three, four = [trial.key for trial in launched.sweep.trials]
    launched.write(step(key, n, reward) for key, reward in zip((one, two, three, four), (1, 3, 4, 2)) for n in (0, 1))
    launched.write(step(key, n, reward) for key, reward in ((two, 7), (three, 5)) for n in (2, 3))
    launched.write(state(key, AdapterPhase.DELETED, 4, 5.0) for key in (one, three, four))
    launched.write([*(step(two, n, 8) for n in range(4, 16)), state(two, AdapterPhase.DONE, 16, 9.0)])


def test_the_result_names_the_winner_and_its_overrides(launched: Launched) -> None:
    finish(launched)
    table, winner = result(launched).split("winner   ")
    rows = [line.split() for line in table.splitlines()]
    assert " ".join(rows[0]) == "trial steps state by step 2 by step 4 at the end accuracy"
    assert rows[1:] == [
        ["lr-3e-4", "16", "done", "3.000", "7.000", "8.000", "-"],
        ["lr-0_001", "4", "stopped", "4.000", "5.000", "-", "-"],
        ["lr-0_003", "2", "stopped", "2.000", "-", "-", "-"],
        ["lr-1e-4", "2", "stopped", "1.000", "-", "-", "-"],
    ]
    assert "set      adapters.0.optimizer.lr=3e-4\n" in winner
    [command] = [shlex.split(line)[2:] for line in winner.splitlines() if line.startswith("alone")]
    overrides = [word for word in command if "=" in word]
    assert command[0] == "train"
    assert command[-len(overrides) - 1] == str(FILES[1])
    assert sweeps.load_config(FILES, overrides).run.name == f"{launched.folder.path.name}-lr-3e-4", "as printed"
    assert overrides[0] == "run.steps=16"
    assert overrides[-1] == "adapters.0.optimizer.lr=3e-4"
    assert "other rounding" in winner
    sweeps.write_sweep(launched.folder, msgspec.structs.replace(launched.sweep, repeats=True))
    assert "bit for bit" in result(launched)


def test_a_sweep_has_ended_when_no_trial_has_steps_to_make(launched: Launched) -> None:
    def ended() -> bool:
        write_summary(launched.folder, wall_s=1.0, adapters={}, report_path=launched.folder.report)
        return sweeps.has_ended(launched.folder)

    assert not sweeps.has_ended(launched.folder)
    assert not ended()
    finish(launched)
    assert ended()
    launched.write([state(launched.sweep.trials[1].key, AdapterPhase.FAILED, 15, 9.0)])
    assert not ended()
    assert "winner   lr-0_001: reward 5.000" in result(launched), "of those that have not failed"


def test_a_trial_that_declines_loses_to_one_that_stopped(launched: Launched) -> None:
    finish(launched)
    launched.write([ResumeRecord(version=4, time_s=10.0, adapter=launched.sweep.trials[1].key)])
    launched.write(step(launched.sweep.trials[1].key, n, 9.0 if n < 10 else 4.5) for n in range(4, 16))
    text = result(launched)
    assert "winner   lr-0_001: reward 5.000, stopped: those that continued ended lower" in text
    assert "set      adapters.0.optimizer.lr=0.001\n" in text


def test_repeats_are_promised_where_the_run_is_deterministic() -> None:
    assert [planned(RATES, f"rollout.deterministic={value}")[1].repeats for value in ("true", "false")] == [True, False]
