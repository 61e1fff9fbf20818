"""Open, resume and finish the records of a run of many steps; print what that cost. A process of its own.

``python -m tests.support.trainer.long_run FOLDER STEPS`` prints ``{"grown_bytes": .., "opened_s": .., ...}``
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.obs.console import LiveConsole
from areal_lora.obs.metrics.records import CheckpointRecord, EvalRecord, PublishRecord, Record, SampleRecord
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.recording import Recorder
from tests.support.obs.fake_run import ADAPTER, make_config
from tests.support.obs.records import step_record

SPIKE = 7.25
"""A gradient norm at one step of the whole run."""
RESUMED = 0.9
"""The share of the run that its last session resumes from; later records are void."""
PHASES = {"pack": 1.5, "wire": 2.5, "verify": 1.0, "write": 0.5, "commit_wait": 3.0, "ack": 9.0, "probe": 12.0}


def records(steps: int) -> Iterator[Record]:
    sample = SampleRecord(prompt="1+1?", completion="#### 2 " * 300, gold="2", reward=1.0)
    for k in range(steps):
        yield step_record(
            step=k,
            version=k,
            time_s=2.0 * (k + 1),
            adapter=ADAPTER,
            reward_mean=k / steps,
            reward_std=0.4,
            loss=0.01,
            grad_norm=SPIKE if k == steps // 3 else 0.4,
            lr=1e-3,
            clip_fraction=0.01,
            kl=0.0,
            entropy=0.5,
            behaviour_mean_abs=0.03,
            mismatch_fresh=1e-6,
            mismatch_stale=0.04,
            n_tokens=1000,
            n_sequences=32,
            mean_answer_tokens=9.0,
            staleness={0: 300, 1: 700},
            step_s=2.0,
            wait_batch_s=0.6,
            annotate_s=0.2,
            train_s=0.8,
            rollout_tokens_per_s=4000.0 + k % 7,
            groups_ready=k % 6,
            groups_running=8,
            groups_leased=8,
            groups_issued=8 * k,
            groups_consumed=8 * k,
            dropped={"stale": k // 7},
            retried={"scorer": k // 9},
            servers_idle=0.1,
            metrics={"extra/skipped": 0.0, "extra/capped_fraction": 0.0},
        )
        yield PublishRecord(
            version=k + 1,
            total_ms=20.0,
            adapter=ADAPTER,
            phases_ms=PHASES,
            nbytes=350_000,
            probe_mean_abs=1e-6,
            probe_max_abs=5e-6,
            differs_from_base=True,
            servers=1,
        )
        yield CheckpointRecord(version=k + 1, write_s=0.05, adapter=ADAPTER, nbytes=3 << 20)
        if k % 50 == 0:
            yield EvalRecord(version=k, step=k, accuracy=k / steps, n=200, adapter=ADAPTER, samples=[sample] * 4)


def memory(key: str) -> int:
    """``VmHWM`` or ``VmRSS`` of this process in bytes."""
    [line] = [row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key)]
    return int(line.split()[1]) * 1024


def main(folder: Path, steps: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(make_config().model_dump_json())
    encoder = msgspec.json.Encoder()
    with RunFolder(folder).metrics.open("wb") as file:
        for record in records(steps):
            file.write(encoder.encode(record) + b"\n")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before, began = memory("VmRSS"), time.monotonic()
    recorder = Recorder(RunFolder(folder), [ADAPTER], {ADAPTER: round(steps * RESUMED)}, began)
    console = LiveConsole(RunFolder(folder), {ADAPTER: steps})
    console.start()
    opened = time.monotonic()
    recorder.finish({ADAPTER: folder / "adapters" / ADAPTER})
    finished = time.monotonic()
    return {
        "grown_bytes": memory("VmHWM") - before,
        "opened_s": opened - began,
        "finished_s": finished - opened,
        "file_bytes": RunFolder(folder).metrics.stat().st_size,
        "steps_done": console.view.steps_done,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
