"""A run folder with plausible metrics, made without running anything."""

import random
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.obs.metrics.records import CheckpointRecord, EvalRecord, PublishRecord, ResumeRecord, SampleRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.events import RestartEvent, write_event
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts

ADAPTER = "toy"
PHASES = {"pack": 4, "wire": 3, "verify": 2, "write": 0.5, "commit_wait": 8}


def make_config() -> Config:
    """A small valid configuration with values that can be told apart."""
    return Config.model_validate(
        {
            "run": {"name": "fake", "seed": 7, "steps": 40},
            "model": {"path": "tiny/model", "dtype": "float32"},
            "adapters": [
                {
                    "name": ADAPTER,
                    "rank": 8,
                    "alpha": 16,
                    "target_modules": ["linear_qkv"],
                    "task": {"kind": "word_problems"},
                    "algorithm": {"kind": "grpo"},
                    "optimizer": {"lr": 1e-3},
                    "sampling": {"prompts_per_step": 8, "n_samples": 4, "max_new_tokens": 16},
                }
            ],
            "trainer": {"world_size": 2, "ep": 2},
            "cluster": {"device": "cpu"},
        }
    )


def make_run(folder: Path, steps: int = 40, seed: int = 0) -> Path:
    """Write ``config.json`` and ``metrics.jsonl`` for ``steps`` steps, evaluated first, every 10 and last."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(make_config().model_dump_json())
    with MetricsWriter(RunFolder(folder)) as writer:
        _write_publish(writer, rng, 0)
        _write_eval(writer, 0, 0.25)
        for step in range(steps):
            _write_step(writer, rng, step, 0.2 + 0.7 * step / steps)
            _write_publish(writer, rng, step + 1)
            writer.write(
                CheckpointRecord(version=step + 1, write_s=abs(rng.gauss(0.05, 0.01)), adapter=ADAPTER, nbytes=3 << 20)
            )
            if step == steps // 2:
                event = RestartEvent(at="2026-01-01T00:00:00Z", process="trainer", how="was killed by signal 9")
                write_event(RunFolder(folder), event)
                writer.write(ResumeRecord(version=step + 1, time_s=2.0 * (step + 1), adapter=ADAPTER))
            if (step + 1) % 10 == 0:
                _write_eval(writer, step + 1, 0.25 + 0.6 * (step + 1) / steps)
    keep(RunFolder(folder), (step_rollouts(step, adapter=ADAPTER) for step in range(0, steps, 5)))
    return folder


def _write_step(writer: MetricsWriter, rng: random.Random, step: int, level: float) -> None:
    writer.write(
        step_record(
            step=step,
            version=step,
            time_s=2.0 * (step + 1),
            adapter=ADAPTER,
            reward_mean=min(1.0, max(0.0, rng.gauss(level, 0.07))),
            reward_std=0.4,
            loss=rng.gauss(0.0, 0.02),
            grad_norm=abs(rng.gauss(0.4, 0.1)),
            lr=1e-3,
            clip_fraction=abs(rng.gauss(0.01, 0.005)),
            behaviour_mean_abs=abs(rng.gauss(0.03, 0.01)),
            entropy=max(0.1, 1.2 - level),
            n_tokens=1000,
            n_sequences=32,
            mean_answer_tokens=9.0,
            staleness={0: 300, 1: 500, 2: 200} if step > 1 else {0: 1000},
            step_s=2.0,
            wait_batch_s=abs(rng.gauss(0.6, 0.2)),
            annotate_s=0.2,
            train_s=0.8,
            checkpoint_join_s=0.02,
            checkpoint_copy_s=0.01,
            publish_join_s=0.05,
            publish_pack_s=0.03,
            mismatch_fresh=10 ** rng.uniform(-7, -6),
            mismatch_stale=abs(rng.gauss(0.05, 0.01)) if step > 1 else None,
            rollout_tokens_per_s=rng.gauss(4000, 300),
            groups_ready=rng.randrange(6),
            groups_running=8,
            groups_leased=8,
            groups_issued=8 * step + 16,
            groups_consumed=8 * step,
            dropped={"timeout": 1, "stale": step // 7} if step >= 3 else {},
            retried={"connection": step // 4, "scorer": 1},
            reissued=step // 7,
            late=step // 15,
            groups_ahead=4,
            servers_idle=abs(rng.gauss(0.15, 0.05)),
            metrics={
                "reward/right": level,
                "reward/brief": -0.1,
                "mismatch/staleness": 0.03,
                "mismatch/numerics": 0.01,
                "mismatch_kl/staleness": 0.0006,
                "mismatch_kl/numerics": 0.0002,
                "time/pacing_margin_s": 0.1,
                "time/batch_spare_s": rng.gauss(0.3, 0.2),
            },
        )
    )


def _write_publish(writer: MetricsWriter, rng: random.Random, version: int) -> None:
    phases = {name: abs(rng.gauss(mean, mean / 6)) for name, mean in PHASES.items()}
    probe = 10 ** rng.uniform(-7, -6)
    writer.write(
        PublishRecord(
            version=version,
            total_ms=sum(phases.values()) + 1.0,
            adapter=ADAPTER,
            phases_ms={**phases, "ack": 14.0, "probe": 30.0},
            nbytes=350_000,
            probe_mean_abs=probe,
            probe_max_abs=probe * 5,
            differs_from_base=version > 0,
        )
    )


def _write_eval(writer: MetricsWriter, step: int, accuracy: float) -> None:
    sample = SampleRecord(prompt="1+1?", completion="#### 2", gold="2", reward=1.0)
    writer.write(
        EvalRecord(
            version=step,
            step=step,
            accuracy=accuracy,
            reward_mean=accuracy,
            n=200,
            adapter=ADAPTER,
            tag="",
            samples=[sample],
        )
    )
