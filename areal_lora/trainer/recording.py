"""What rank 0 does for all: it asks the controller for batches and evaluations and writes the records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.algorithms.advantages import sample_rewards
from areal_lora.algorithms.alignment import shifted_share
from areal_lora.checkpoint.saver import Save
from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import recorded_s
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    ResumeRecord,
    RolloutSampleRecord,
    SampleRecord,
    StepRecord,
)
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import write_summary
from areal_lora.obs.trace import Spans
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.rollout.channel.messages import EvalResult, RolloutSample, Stats
from areal_lora.run_folder.heartbeat import beat
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.learn import LearnReport
from areal_lora.trainer.tenant import Tenant
from areal_lora.types import AdapterRef, TrainBatch, TrajectoryGroup
from areal_lora.weight_sync.trainer.report import PublishReport

log = get_logger(__name__)

EVAL_TAG = "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """``servers_idle`` is the fraction of the time in which no group was in flight. None: not known."""

    tokens_per_s: float | None = None
    servers_idle: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    tokens: int
    idle_s: float


class RateMeter:
    """``fresh`` are the adapters whose counters begin at 0 now; of others the first step tells no rate."""

    def __init__(self, fresh: Iterable[str], now_s: float) -> None:
        self._marks = {name: _Mark(at_s=now_s, tokens=0, idle_s=0.0) for name in fresh}

    def step(self, adapter: str, *, tokens: int, idle_s: float, now_s: float) -> Rates:
        """Rates since the adapter's step before. Counters that went back say nothing."""
        before = self._marks.get(adapter)
        self._marks[adapter] = _Mark(at_s=now_s, tokens=tokens, idle_s=idle_s)
        if before is None or tokens < before.tokens or idle_s < before.idle_s or now_s <= before.at_s:
            return Rates()
        elapsed_s = now_s - before.at_s
        return Rates(
            tokens_per_s=(tokens - before.tokens) / elapsed_s,
            servers_idle=min(1.0, (idle_s - before.idle_s) / elapsed_s),
        )


def evaluation_due(version: int, asked: int, *, every_steps: int, last: int) -> bool:
    """Whether ``version`` is to be evaluated, where ``asked`` is the newest that was (-1: none).

    Due are version 0, the ``last`` one and every multiple of ``every_steps``, or in place of a multiple that was
    passed over a later version.
    """
    if every_steps == 0:
        return version in (0, last)
    return version >= last or version - version % every_steps > asked


class Recorder:
    """Rank 0 only. Holds the controller's client and the metrics writer."""

    def __init__(
        self,
        config: Config,
        run_folder: RunFolder,
        client: ControllerClient,
        tenants: Sequence[Tenant],
        started_s: float,
    ) -> None:
        """Records that speak of versions beyond those the ``tenants`` go on from are superseded."""
        self._config = config
        self._tenants = {tenant.name: tenant for tenant in tenants}
        before_s = recorded_s(run_folder)
        self._run_folder = run_folder
        self._client = client
        self._writer = MetricsWriter(run_folder)
        self._started_s = started_s - before_s
        for tenant in tenants:
            if tenant.resumed:
                self._writer.write(ResumeRecord(adapter=tenant.name, version=tenant.version, time_s=before_s))
        self._stats: Stats | None = None
        self._meter = RateMeter([t.name for t in tenants if not t.resumed], time.monotonic())

    def status(self, text: str) -> None:
        set_status(self._run_folder, "trainer", 0, text)
        self.beat()

    def beat(self) -> None:
        beat(self._run_folder, "trainer", 0)

    def next_groups(self, tenant: Tenant, interrupted: Callable[[], bool]) -> list[TrajectoryGroup] | None:
        """Wait for the tenant's next batch, or until ``interrupted()`` (None).

        Evaluations that finished meanwhile are recorded.
        """
        self.status(f"step {tenant.version}: waiting for rollouts of {tenant.name}")

        def beat_or_interrupted() -> bool:
            self.beat()
            return interrupted()

        batch = self._client.poll_batch(
            tenant.name, step=tenant.version, version=tenant.version, interrupted=beat_or_interrupted
        )
        if batch is None:
            return None
        self.status(f"step {tenant.version}: training {tenant.name}")
        self._stats = batch.stats
        tenant.ledger = batch.snapshot
        self._record_evals(batch.events)
        self._record_samples(tenant, batch.samples)
        return list(batch.groups)

    def evaluate(self, tenant: Tenant) -> None:
        """Ask for a held-out evaluation of the tenant's version, if one is due; it begins when that is active."""
        every, last = self._config.eval.every_steps, self._config.run.steps
        if evaluation_due(tenant.version, tenant.asked, every_steps=every, last=last):
            if not tenant.awaited or tenant.version >= last:
                self.request_eval(tenant.ref)
            elif tenant.version % every == 0:
                log.info(
                    "the evaluation of %s waits for that of v%d, and will be of the version that is the newest then",
                    tenant.ref,
                    min(tenant.awaited),
                )

    def request_eval(self, ref: AdapterRef) -> None:
        """Ask for a held-out evaluation; it begins when the version is active."""
        tenant = self._tenants[ref.name]
        tenant.awaited.add(ref.version)
        tenant.asked = max(tenant.asked, ref.version)
        self._client.request_eval(ref, EVAL_TAG)

    def wait_evals(self, tenant: Tenant, interrupted: Callable[[], bool]) -> bool:
        """Until every evaluation that was asked for has an answer (True), or until ``interrupted()`` (False)."""
        while tenant.awaited:
            ref = AdapterRef(name=tenant.name, version=min(tenant.awaited))
            self.status(f"waiting for the evaluation of {ref}")
            result = self._client.poll_eval(ref, EVAL_TAG, interrupted=interrupted)
            if result is None:
                return False
            self._record_evals([result])
        return True

    def published(self, tenant: Tenant, report: PublishReport) -> None:
        self._writer.write(
            PublishRecord(
                adapter=tenant.name,
                version=report.ref.version,
                total_ms=report.phases["ack"],
                phases_ms=dict(report.phases),
                nbytes=report.nbytes,
                probe_mean_abs=report.probe_mean_abs,
                probe_max_abs=report.probe_max_abs,
                differs_from_base=bool(report.differs),
                servers=len(report.acks),
                lost=report.lost,
            )
        )

    def checkpointed(self, save: Save) -> None:
        self._writer.write(
            CheckpointRecord(
                adapter=save.ref.name,
                version=save.ref.version,
                write_s=save.write_s,
                nbytes=save.nbytes,
                failed=save.failed,
            )
        )

    def step(
        self,
        tenant: Tenant,
        batch: TrainBatch,
        report: LearnReport,
        histogram: dict[int, int],
        spans: Spans,
        audit: Audit | None = None,
    ) -> None:
        """Write the record of a step that has just been taken (``tenant.version`` is the new version).

        ``audit`` is what has become known during the step, of its batch or of the one before.
        """
        audit = audit or Audit()
        votes, share = shifted_share(report.sums)
        self.beat()
        stats = self._stats
        now = time.monotonic()
        rates = Rates()
        if stats:
            rates = self._meter.step(tenant.name, tokens=stats.tokens_generated, idle_s=stats.idle_s, now_s=now)
        seconds = spans.seconds
        rewards = sample_rewards(batch.rewards, batch.sample_ids)
        answers = float(batch.loss_mask.sum()) / batch.n_sequences
        self._writer.write(
            StepRecord(
                adapter=tenant.name,
                step=tenant.version - 1,
                version=tenant.version - 1,
                time_s=now - self._started_s,
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std(correction=0)),
                loss=report.per_token("loss"),
                grad_norm=report.grad_norm,
                lr=report.lr,
                clip_fraction=report.per_token("clipped"),
                behaviour_mean_abs=report.per_token("behaviour_abs"),
                mismatch_fresh=_mismatch(report, "fresh"),
                mismatch_stale=_mismatch(report, "stale"),
                kl=report.per_token("kl"),
                entropy=report.per_token("entropy"),
                n_tokens=batch.n_tokens,
                n_sequences=batch.n_sequences,
                mean_answer_tokens=answers,
                staleness=histogram,
                step_s=spans.total_s,
                wait_batch_s=seconds["wait_batch"],
                annotate_s=seconds["annotate"],
                train_s=seconds["train"],
                checkpoint_join_s=seconds["checkpoint_join"],
                checkpoint_copy_s=seconds["checkpoint_copy"],
                publish_join_s=seconds["publish_join"],
                publish_pack_s=seconds["publish_pack"],
                rollout_tokens_per_s=rates.tokens_per_s,
                groups_ready=stats.ready if stats else 0,
                groups_running=stats.running if stats else 0,
                groups_leased=stats.leased if stats else 0,
                groups_issued=stats.issued if stats else 0,
                groups_consumed=stats.consumed if stats else 0,
                dropped=stats.dropped if stats else {},
                retried=stats.retried if stats else {},
                reissued=stats.reissued if stats else 0,
                late=stats.late if stats else 0,
                servers_idle=rates.servers_idle,
                audited_tokens=audit.tokens,
                audit_gap=audit.gap,
                unaudited_steps=audit.silent_steps,
                extra={
                    "skipped": report.skipped,
                    "capped_fraction": report.per_token("capped"),
                    "shift_votes": votes,
                    "shifted_share": share,
                    "audit_s": audit.took_s,
                },
            )
        )

    def _record_evals(self, results: Sequence[EvalResult]) -> None:
        for result in results:
            self._tenants[result.adapter].awaited.discard(result.version)
            if result.error:
                log.warning("evaluation of %s@v%d failed: %s", result.adapter, result.version, result.error)
                continue
            self._tenants[result.adapter].evaluations[result.version] = Evaluation(
                accuracy=result.accuracy, reward_mean=result.reward_mean
            )
            samples = [
                SampleRecord(
                    prompt=s.prompt, completion=s.completion, gold=s.answer, reward=s.reward, correct=s.correct
                )
                for s in result.samples
            ]
            self._writer.write(
                EvalRecord(
                    adapter=result.adapter,
                    version=result.version,
                    step=result.version,
                    accuracy=result.accuracy,
                    n=result.n,
                    reward_mean=result.reward_mean,
                    unscored=result.unscored,
                    left_out=result.left_out,
                    left_out_first=list(result.left_out_first),
                    tag=result.tag,
                    samples=samples,
                )
            )

    def _record_samples(self, tenant: Tenant, samples: Sequence[RolloutSample]) -> None:
        for s in samples:
            self._writer.write(
                RolloutSampleRecord(
                    adapter=tenant.name,
                    step=tenant.version,
                    prompt=s.prompt,
                    completion=s.completion,
                    gold=s.answer,
                    reward=s.reward,
                    versions=[s.version],
                )
            )

    def finish(self, adapter: Path) -> None:
        """Stop the controller, write the report and, last, the summary."""
        self.status("writing the report")
        self._client.shutdown()
        self._writer.close()
        report = write_report(self._run_folder)
        wall_s = time.monotonic() - self._started_s
        write_summary(self._run_folder, wall_s=wall_s, adapter_path=adapter, report_path=report)
        self.status("done")

    def close(self) -> None:
        self._client.close()
        self._writer.close()


def _mismatch(report: LearnReport, kind: str) -> float | None:
    """Mean |trainer - rollout| logprob over the ``fresh`` or ``stale`` tokens; None if there are none."""
    count = report.sums[f"{kind}_tokens"]
    return report.sums[f"{kind}_gap"] / count if count else None
