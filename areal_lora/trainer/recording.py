"""The records of a run, written by rank 0: steps, publishes, checkpoints, evaluations; the report at the end."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areal_lora.checkpoint.checkpoint_store import CheckpointSave
from areal_lora.engine.common.adapter_engine import DeviceMemory
from areal_lora.obs.machine import MachineWatch
from areal_lora.obs.metrics import records
from areal_lora.obs.metrics.reader import recorded_s
from areal_lora.obs.metrics.rollout_store import RolloutWriter, StepRollouts
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import write_summary
from areal_lora.obs.trace import Spans
from areal_lora.operations.protocol import OptimStep, StepResult
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.channel_messages import Batch
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import beat, set_status
from areal_lora.trainer import step_metrics
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.learn import LearnReport
from areal_lora.types import AdapterPhase, AdapterRef, TrainBatch
from areal_lora.weight_sync.trainer.decisions import PublishReport

log = get_logger(__name__)


class RateMeter:
    """Rates from the controller's counters, which continue over restarts of trainer and controller.

    ``fresh`` are the adapters whose counters start at 0 now. For any other the first step has no rate.
    """

    def __init__(self, fresh: Iterable[str], now_s: float) -> None:
        self._marks = dict.fromkeys(fresh, (now_s, 0, 0.0))
        """Of each adapter's newest step: time, tokens and idle seconds."""

    def start(self, adapter: str, now_s: float) -> None:
        """The counters of ``adapter`` start at 0 now."""
        self._marks[adapter] = (now_s, 0, 0.0)

    def end(self, adapter: str) -> None:
        """No step of ``adapter`` follows."""
        self._marks.pop(adapter, None)

    def step(self, adapter: str, *, tokens: int, idle_s: float, now_s: float) -> step_metrics.Metrics:
        """Rates since the adapter's previous step; unknown if a counter decreased.

        ``servers_idle`` is the fraction of the time without a group of the adapter in flight: less than
        any server's own idle time.
        """
        before_s, tokens_before, idle_before_s = self._marks.get(adapter, (math.inf, 0, 0.0))
        self._marks[adapter] = (now_s, tokens, idle_s)
        if tokens < tokens_before or idle_s < idle_before_s or now_s <= before_s:
            return {}
        elapsed_s = now_s - before_s
        return {
            "train/rollout_tokens_per_s": (tokens - tokens_before) / elapsed_s,
            "train/servers_idle": min(1.0, (idle_s - idle_before_s) / elapsed_s),
        }


class Recorder:
    """Rank 0's metrics writer and status line; times count from the start of the run, over all its sessions.

    ``resumed`` are the versions that adapters resume from: records of later versions are superseded.
    ``only`` is as in `MetricsWriter`. Without ``rollouts`` none is kept. ``machines`` collects the figures of all.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        adapters: Sequence[str],
        resumed: Mapping[str, int],
        started_s: float,
        *,
        only: str | None = None,
        devices: step_metrics.Devices | None = None,
        rollouts: RolloutWriter | None = None,
        machines: MachineWatch | None = None,
    ) -> None:
        self._run_folder, self._devices, self._rollouts = run_folder, devices or step_metrics.Devices(), rollouts
        self._machines = machines
        before_s = recorded_s(run_folder)
        self._started_s = started_s - before_s
        self._writer = MetricsWriter(run_folder, only)
        for name, version in resumed.items():
            self._resume(name, version, before_s)
        self._batches: dict[str, tuple[Batch, step_metrics.Metrics]] = {}
        self._learned: dict[str, dict[int, LearnReport]] = {}
        self._meter = RateMeter([name for name in adapters if name not in resumed], time.monotonic())

    def joined(self, ref: AdapterRef, *, steps: int | None, resumed: bool) -> None:
        """An adapter of ``steps`` (None: its client decides) has joined at ``ref``; see `Recorder` for ``resumed``."""
        if resumed:
            self._resume(ref.name, ref.version, time.monotonic() - self._started_s)
        else:
            self._meter.start(ref.name, time.monotonic())
        self.phase(ref, AdapterPhase.PENDING, "", steps)

    def _resume(self, adapter: str, version: int, time_s: float) -> None:
        self._writer.write(records.ResumeRecord(adapter=adapter, version=version, time_s=time_s))
        if self._rollouts:
            self._rollouts.drop(adapter, version)

    def status(self, text: str) -> None:
        set_status(self._run_folder, "trainer", 0, text)
        self.beat()

    def beat(self) -> None:
        beat(self._run_folder, "trainer", 0)

    def batch(self, batch: Batch) -> None:
        """Take a batch that is consumed; it goes into the record of its step."""
        self._batches[batch.adapter] = batch.recorded(), step_metrics.of_rollouts(batch)

    def evaluation(self, record: records.EvalRecord) -> None:
        self._writer.write(record)

    def reported(self, report: PublishReport, new: bool) -> None:
        """Record the publish of a ``new`` version, and servers that joined, left or were lost since the last report."""
        cast = report.cast
        if new:
            self._writer.write(
                records.PublishRecord(
                    adapter=report.ref.name,
                    version=report.ref.version,
                    total_ms=report.phases["ack"],
                    phases_ms=dict(report.phases),
                    nbytes=report.nbytes,
                    probe_mean_abs=report.probe_mean_abs,
                    probe_max_abs=report.probe_max_abs,
                    differs_from_base=bool(report.differs),
                    servers=len(report.servers),
                    lost=report.lost,
                    merge_survives=cast.survives if cast else None,
                    merge_error=cast.error if cast else None,
                    merge_unmoved=cast.unmoved if cast else None,
                )
            )
        if report.joined or report.left or report.lost:
            self._writer.write(
                records.MembersRecord(
                    adapter=report.ref.name,
                    version=report.ref.version,
                    servers=len(report.servers),
                    joined=report.joined,
                    left=report.left,
                    lost=report.lost,
                    publish_ms=report.phases["ack"],
                    time_s=time.monotonic() - self._started_s,
                )
            )

    def phase(self, ref: AdapterRef, phase: AdapterPhase, reason: str, steps: int | None = None) -> None:
        """Record that the adapter is in ``phase`` from now on; see `AdapterStateRecord` for ``steps``.

        What is kept for its next step ends with it: reports have arrays over all tokens of a batch.
        """
        if phase in (AdapterPhase.DONE, AdapterPhase.FAILED, AdapterPhase.DELETED):
            self._batches.pop(ref.name, None)
            self._learned.pop(ref.name, None)
            self._meter.end(ref.name)
        self._writer.write(
            records.AdapterStateRecord(
                adapter=ref.name,
                state=phase,
                version=ref.version,
                reason=reason,
                time_s=time.monotonic() - self._started_s,
                steps=steps,
            )
        )

    def checkpointed(self, save: CheckpointSave) -> None:
        self._writer.write(
            records.CheckpointRecord(
                adapter=save.ref.name,
                version=save.ref.version,
                write_s=save.write_s,
                nbytes=save.nbytes,
                failed=save.failed,
            )
        )

    def step(
        self,
        ref: AdapterRef,
        batch: TrainBatch,
        report: LearnReport,
        histogram: dict[int, int],
        spans: Spans,
        audit: Audit | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Record the training step that made ``ref``; ``audit`` is of its batch or the previous one."""
        self.beat()
        now = time.monotonic()
        received, of_rollouts = self._batches.pop(ref.name, (None, {}))
        stats, metrics = received.stats if received else None, dict(of_rollouts)
        if stats:
            metrics |= self._meter.step(ref.name, tokens=stats.tokens_generated, idle_s=stats.idle_s, now_s=now)
        metrics |= step_metrics.of_batch(batch) | step_metrics.of_learning(report) | step_metrics.of_memory(memory)
        metrics |= self._of_machines(spans, batch.n_tokens)
        audited, version = audit or Audit(), ref.version - 1
        learned = {before: known for before, known in self._learned.get(ref.name, {}).items() if before == version - 1}
        learned[version] = report
        self._learned[ref.name] = learned
        metrics |= step_metrics.of_audit(audited) | step_metrics.of_mismatch(audited, learned)
        self._writer.write(
            records.StepRecord(
                adapter=ref.name,
                step=ref.version - 1,
                version=ref.version - 1,
                time_s=now - self._started_s,
                step_s=spans.total_s,
                spans=dict(spans.seconds),
                staleness=histogram,
                dropped=stats.dropped if stats else {},
                retried=stats.retried if stats else {},
                faults=stats.faults if stats else {},
                metrics=step_metrics.measured(metrics),
            )
        )
        if received and self._rollouts and batch.advantages is not None:
            own = report.logprobs
            self._rollouts.write(
                StepRollouts(
                    adapter=ref.name,
                    step=ref.version - 1,
                    groups=received.groups,
                    texts=received.texts,
                    advantages=batch.advantages.float().cpu().numpy(),
                    trainer_logprobs=None if own is None else own.float().cpu().numpy(),
                    entropies=None if report.entropies is None else report.entropies.numpy(),
                    dropped=received.dropped,
                )
            )

    def client_step(
        self, before: AdapterRef, window: step_metrics.Window, step: OptimStep, outcome: StepResult, spans: Spans
    ) -> None:
        """Record a client's step, which started at ``before``."""
        self._writer.write(
            records.StepRecord(
                adapter=before.name,
                step=outcome.step if outcome.skipped else outcome.step - 1,
                version=before.version,
                time_s=time.monotonic() - self._started_s,
                step_s=spans.total_s,
                spans=dict(spans.seconds),
                by_client=True,
                taken=not outcome.skipped,
                n_targets=window.targets,
                metrics=step_metrics.measured(
                    step_metrics.of_client(window, step, outcome) | self._of_machines(spans, window.tokens)
                ),
            )
        )

    def _of_machines(self, spans: Spans, tokens: int) -> step_metrics.Metrics:
        speed = step_metrics.of_speed(spans, tokens, self._devices)
        return {**speed, **self._machines.rounds.take()} if self._machines else speed

    def finish(self, adapters: Mapping[str, Path]) -> None:
        """Write the report and, last, the summary, which names the exported folder of each of ``adapters``.

        The run is done without the report, too: what prevents it is logged.
        """
        self.status("writing the report")
        self.close()
        try:
            write_report(self._run_folder)
        except (OSError, ValueError, LookupError):  # of a file of rollouts that is damaged
            log.exception("%s is not written (fix: areal-lora report)", self._run_folder.report)
        wall_s = time.monotonic() - self._started_s
        write_summary(self._run_folder, wall_s=wall_s, adapters=adapters, report_path=self._run_folder.report)
        self.status("done")

    def close(self) -> None:
        self._writer.close()
        if self._machines:
            self._machines.stop()
        if self._rollouts:
            self._rollouts.close()
