"""The records of a run, written by rank 0: steps, publishes, checkpoints, evaluations; the report at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.algorithms.advantages import sample_rewards
from areal_lora.algorithms.alignment import shifted_share
from areal_lora.algorithms.credit import explained_variance
from areal_lora.checkpoint.saver import Save
from areal_lora.obs.metrics.reader import recorded_s
from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    MembersRecord,
    PublishRecord,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
)
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import write_summary
from areal_lora.obs.trace import Spans
from areal_lora.operations.messages import OptimStep, Stepped
from areal_lora.rollout.channel.messages import EvalResult, RolloutSample, Stats
from areal_lora.rollout.eval_record import eval_record
from areal_lora.run_folder.heartbeat import beat
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.client_steps import Window, step_record
from areal_lora.trainer.group_figures import GroupFigures
from areal_lora.trainer.learn import LearnReport
from areal_lora.types import AdapterPhase, AdapterRef, TrainBatch
from areal_lora.weight_sync.trainer.report import PublishReport

_UNKNOWN = GroupFigures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Between two steps; None if unknown. ``servers_idle`` is the fraction of the time with no group in flight."""

    tokens_per_s: float | None = None
    servers_idle: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    tokens: int
    idle_s: float


class RateMeter:
    """Rates from the controller's counters, which continue over restarts of trainer and controller.

    ``fresh`` are the adapters whose counters begin at 0 now. For any other the first step has no rate.
    """

    def __init__(self, fresh: Iterable[str], now_s: float) -> None:
        self._marks = {name: _Mark(at_s=now_s, tokens=0, idle_s=0.0) for name in fresh}

    def begin(self, adapter: str, now_s: float) -> None:
        """The counters of ``adapter`` begin at 0 now."""
        self._marks[adapter] = _Mark(at_s=now_s, tokens=0, idle_s=0.0)

    def step(self, adapter: str, *, tokens: int, idle_s: float, now_s: float) -> Rates:
        """Rates since the adapter's previous step; unknown if a counter decreased."""
        before = self._marks.get(adapter)
        self._marks[adapter] = _Mark(at_s=now_s, tokens=tokens, idle_s=idle_s)
        if before is None or tokens < before.tokens or idle_s < before.idle_s or now_s <= before.at_s:
            return Rates()
        elapsed_s = now_s - before.at_s
        return Rates(
            tokens_per_s=(tokens - before.tokens) / elapsed_s,
            servers_idle=min(1.0, (idle_s - before.idle_s) / elapsed_s),
        )


class Recorder:
    """Rank 0's metrics writer and status line; times count from the start of the run, over all its sessions.

    ``resumed`` are the versions that adapters resume from: records of later versions are superseded.
    ``only`` is as in `MetricsWriter`.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        adapters: Sequence[str],
        resumed: Mapping[str, int],
        started_s: float,
        *,
        only: str | None = None,
    ) -> None:
        self._run_folder = run_folder
        before_s = recorded_s(run_folder)
        self._started_s = started_s - before_s
        self._writer = MetricsWriter(run_folder, only)
        for name, version in resumed.items():
            self._writer.write(ResumeRecord(adapter=name, version=version, time_s=before_s))
        self._stats: dict[str, Stats] = {}
        self._components: dict[str, dict[str, float]] = {}
        self._costs: dict[str, dict[str, float]] = {}
        self._figures: dict[str, GroupFigures] = {}
        self._meter = RateMeter([name for name in adapters if name not in resumed], time.monotonic())

    def joined(self, ref: AdapterRef, *, steps: int | None, resumed: bool) -> None:
        """An adapter has joined at ``ref``; if it is ``resumed``, records of later versions are superseded.

        ``steps`` are its training steps, None if a client decides.
        """
        if resumed:
            now_s = time.monotonic() - self._started_s
            self._writer.write(ResumeRecord(adapter=ref.name, version=ref.version, time_s=now_s))
        else:
            self._meter.begin(ref.name, time.monotonic())
        self.phase(ref, AdapterPhase.PENDING, "", steps)

    def status(self, text: str) -> None:
        set_status(self._run_folder, "trainer", 0, text)
        self.beat()

    def beat(self) -> None:
        beat(self._run_folder, "trainer", 0)

    def batch(
        self,
        ref: AdapterRef,
        stats: Stats,
        samples: Sequence[RolloutSample],
        reward_components: Mapping[str, float] | None = None,
        reward_costs: Mapping[str, float] | None = None,
        figures: GroupFigures = _UNKNOWN,
    ) -> None:
        """Record samples of the batch that is consumed at ``ref``; the rest goes into the record of its step."""
        self._stats[ref.name] = stats
        self._components[ref.name] = dict(reward_components or {})
        self._costs[ref.name] = dict(reward_costs or {})
        self._figures[ref.name] = figures
        for s in samples:
            self._writer.write(
                RolloutSampleRecord(
                    adapter=ref.name,
                    step=ref.version,
                    prompt=s.prompt,
                    completion=s.completion,
                    gold=s.answer,
                    reward=s.reward,
                    versions=[s.version],
                )
            )

    def evaluation(self, result: EvalResult, order: int) -> None:
        """Record set number ``order`` of an evaluation."""
        self._writer.write(eval_record(result, order))

    def published(self, report: PublishReport) -> None:
        self._writer.write(
            PublishRecord(
                adapter=report.ref.name,
                version=report.ref.version,
                total_ms=report.phases["ack"],
                phases_ms=dict(report.phases),
                nbytes=report.nbytes,
                probe_mean_abs=report.probe_mean_abs,
                probe_max_abs=report.probe_max_abs,
                differs_from_base=bool(report.differs),
                servers=len(report.acks),
                lost=report.lost,
                merge_survives=None if report.cast is None else report.cast.survives,
                merge_error=None if report.cast is None else report.cast.error,
                merge_unmoved=None if report.cast is None else report.cast.unmoved,
            )
        )

    def members(self, report: PublishReport) -> None:
        """Record which servers joined, left or were lost since the last report, if any."""
        if not (report.joined or report.left or report.lost):
            return
        self._writer.write(
            MembersRecord(
                adapter=report.ref.name,
                version=report.ref.version,
                servers=len(report.acks),
                joined=report.joined,
                left=report.left,
                lost=report.lost,
                publish_ms=report.phases["ack"],
                time_s=time.monotonic() - self._started_s,
            )
        )

    def phase(self, ref: AdapterRef, phase: AdapterPhase, reason: str, steps: int | None = None) -> None:
        """Record that the adapter is in ``phase`` from now on; see `AdapterStateRecord` for ``steps``."""
        self._writer.write(
            AdapterStateRecord(
                adapter=ref.name,
                state=phase,
                version=ref.version,
                reason=reason,
                time_s=time.monotonic() - self._started_s,
                steps=steps,
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
        ref: AdapterRef,
        batch: TrainBatch,
        report: LearnReport,
        histogram: dict[int, int],
        spans: Spans,
        audit: Audit | None = None,
    ) -> None:
        """Record the training step that made ``ref``.

        ``audit`` is what became known during the step about its batch or the previous one.
        """
        audit = audit or Audit()
        votes, share = shifted_share(report.sums)
        self.beat()
        stats = self._stats.get(ref.name)
        now = time.monotonic()
        rates = Rates()
        if stats:
            rates = self._meter.step(ref.name, tokens=stats.tokens_generated, idle_s=stats.idle_s, now_s=now)
        seconds = spans.seconds
        rewards = sample_rewards(batch.rewards, batch.sample_ids)
        answers = float(batch.loss_mask.sum()) / batch.n_sequences
        figures = self._figures.get(ref.name, _UNKNOWN)
        self._writer.write(
            StepRecord(
                adapter=ref.name,
                step=ref.version - 1,
                version=ref.version - 1,
                time_s=now - self._started_s,
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std(correction=0)),
                reward_components=self._components.get(ref.name, {}),
                reward_costs=self._costs.get(ref.name, {}),
                loss=report.per_token("loss"),
                grad_norm=report.grad_norm,
                lr=report.lr,
                clip_fraction=report.per_sampled_token("clipped"),
                behaviour_mean_abs=report.per_sampled_token("behaviour_abs"),
                mismatch_fresh=_mismatch(report, "fresh"),
                mismatch_stale=_mismatch(report, "stale"),
                kl=report.per_sampled_token("kl"),
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
                groups_equal=figures.equal,
                groups_all_right=figures.all_right,
                groups_all_wrong=figures.all_wrong,
                sampled_nll=_sampled_nll(batch),
                groups_ahead=stats.ahead if stats else 0,
                pacing_margin_s=stats.margin_s if stats else 0.0,
                batch_spare_s=stats.spare_s if stats else None,
                dropped=stats.dropped if stats else {},
                retried=stats.retried if stats else {},
                faults=stats.faults if stats else {},
                reissued=stats.reissued if stats else 0,
                late=stats.late if stats else 0,
                servers_idle=rates.servers_idle,
                audited_tokens=audit.tokens,
                audit_gap=audit.gap,
                unaudited_steps=audit.silent_steps,
                value_loss=report.mean("value_loss", "value_tokens"),
                explained_variance=explained_variance(batch),
                extra={
                    "skipped": report.skipped,
                    "capped_fraction": report.per_sampled_token("capped"),
                    "given_fraction": float(batch.given.float().mean()),
                    "shift_votes": votes,
                    "shifted_share": share,
                    "audit_s": audit.took_s,
                    **_baseline(batch),
                    **_critic(report),
                },
            )
        )

    def client_step(self, before: AdapterRef, window: Window, step: OptimStep, outcome: Stepped, spans: Spans) -> None:
        """Record a client's step, which began at ``before``."""
        time_s = time.monotonic() - self._started_s
        self._writer.write(step_record(before, window, step, outcome, spans, time_s))

    def finish(self, adapters: Mapping[str, Path]) -> None:
        """Write the report and, last, the summary, which names the exported folder of each of ``adapters``."""
        self.status("writing the report")
        self._writer.close()
        report = write_report(self._run_folder)
        wall_s = time.monotonic() - self._started_s
        write_summary(self._run_folder, wall_s=wall_s, adapters=adapters, report_path=report)
        self.status("done")

    def close(self) -> None:
        self._writer.close()


def _sampled_nll(batch: TrainBatch) -> float | None:
    """Mean negative log-probability of the tokens that servers sampled; None if there are none."""
    given = batch.given.repeat_interleave(batch.cu_seqlens.diff())  # [T]
    sampled = batch.rollout_logprobs[batch.loss_mask & ~given]
    return -float(sampled.mean()) if sampled.numel() else None


def _baseline(batch: TrainBatch) -> dict[str, float]:
    """Mean reward of the batch's greedy answers, where there are any."""
    if batch.baselines is None:
        return {}
    return {"baseline_mean": float(sample_rewards(batch.baselines, batch.sample_ids).nanmean())}


def _critic(report: LearnReport) -> dict[str, float | None]:
    if "value_steps" not in report.sums:
        return {}
    return {
        "value_clipped": report.mean("value_clipped", "value_tokens"),
        "value_grad_norm": report.mean("value_grad_norms", "value_steps"),
        "value_skipped": report.mean("value_skipped", "value_steps"),
    }


def _mismatch(report: LearnReport, kind: str) -> float | None:
    """Mean |trainer - rollout| logprob over the ``fresh`` or ``stale`` tokens; None if there are none."""
    count = report.sums[f"{kind}_tokens"]
    return report.sums[f"{kind}_gap"] / count if count else None
