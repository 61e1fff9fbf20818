"""Rank 0's link to the rollout controller: batches, evaluations, and what a checkpoint keeps of both.

next_groups        a batch, its ledger snapshot, evaluations that finished meanwhile
evaluate_if_due    requests an evaluation, which begins when the version is active
state              -> `ControllerState` of an adapter, for its checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import Config
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.rollout.channel.messages import EvalResult
from areal_lora.trainer.adapter import ControllerState
from areal_lora.trainer.recording import Recorder
from areal_lora.types import AdapterRef, TrajectoryGroup

log = get_logger(__name__)

EVAL_TAG = "held-out"


def evaluation_due(version: int, newest: int, *, every_steps: int, last: int) -> bool:
    """Whether ``version`` is to be evaluated, where ``newest`` is the newest that was requested (-1: none).

    Due are version 0, the ``last`` one and every multiple of ``every_steps``, or the first later version in place of
    a multiple that was passed over.
    """
    if every_steps == 0:
        return version in (0, last)
    return version >= last or version - version % every_steps > newest


@dataclass(slots=True, kw_only=True)
class EvalTracker:
    """The held-out evaluations of one adapter: results by version, versions without an answer, newest requested."""

    results: dict[int, Evaluation] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    newest: int = -1

    @classmethod
    def restored(cls, state: ControllerState) -> EvalTracker:
        newest = max(state.evaluations.keys() | state.pending, default=-1)
        return cls(results=dict(state.evaluations), pending=set(state.pending), newest=newest)

    def requested(self, version: int) -> None:
        self.pending.add(version)
        self.newest = max(self.newest, version)

    def answered(self, result: EvalResult) -> None:
        self.pending.discard(result.version)
        if not result.error:
            self.results[result.version] = Evaluation(accuracy=result.accuracy, reward_mean=result.reward_mean)


class ControllerLink:
    """One per run, on rank 0. ``restored`` are the adapters and what their checkpoints kept (empty without one)."""

    def __init__(
        self, config: Config, client: ControllerClient, recorder: Recorder, restored: dict[str, ControllerState]
    ) -> None:
        self._config, self._client, self._recorder = config, client, recorder
        self._evals = {name: EvalTracker.restored(state) for name, state in restored.items()}
        self._ledgers = {name: state.ledger for name, state in restored.items()}

    def state(self, adapter: str) -> ControllerState:
        tracker = self._evals[adapter]
        return ControllerState(
            ledger=self._ledgers[adapter], evaluations=dict(tracker.results), pending=frozenset(tracker.pending)
        )

    def next_groups(self, ref: AdapterRef, interrupted: Callable[[], bool]) -> list[TrajectoryGroup] | None:
        """Wait for the next batch of ``ref``'s adapter, consumed at ``ref``, or until ``interrupted()`` (None).

        Evaluations that finished meanwhile are recorded.
        """
        self._recorder.status(f"step {ref.version}: waiting for rollouts of {ref.name}")

        def beat_or_interrupted() -> bool:
            self._recorder.beat()
            return interrupted()

        batch = self._client.poll_batch(
            ref.name, step=ref.version, version=ref.version, interrupted=beat_or_interrupted
        )
        if batch is None:
            return None
        self._recorder.status(f"step {ref.version}: training {ref.name}")
        self._ledgers[ref.name] = batch.snapshot
        self.record_evals(batch.events)
        self._recorder.batch(ref, batch.stats, batch.samples)
        return list(batch.groups)

    def evaluate_if_due(self, ref: AdapterRef) -> None:
        """Request a held-out evaluation of ``ref`` if due and none is pending; of the last version in any case."""
        tracker = self._evals[ref.name]
        every, last = self._config.eval.every_steps, self._config.run.steps
        if evaluation_due(ref.version, tracker.newest, every_steps=every, last=last):
            if not tracker.pending or ref.version >= last:
                self.request_eval(ref)
            elif ref.version % every == 0:
                log.info(
                    "the evaluation of %s is postponed until that of v%d is done, and will use the newest version then",
                    ref,
                    min(tracker.pending),
                )

    def request_eval(self, ref: AdapterRef) -> None:
        self._evals[ref.name].requested(ref.version)
        self._client.request_eval(ref, EVAL_TAG)

    def wait_evals(self, adapter: str, interrupted: Callable[[], bool]) -> bool:
        """Wait until every requested evaluation has an answer (True), or until ``interrupted()`` (False)."""
        while pending := self._evals[adapter].pending:
            ref = AdapterRef(name=adapter, version=min(pending))
            self._recorder.status(f"waiting for the evaluation of {ref}")
            result = self._client.poll_eval(ref, EVAL_TAG, interrupted=interrupted)
            if result is None:
                return False
            self.record_evals([result])
        return True

    def record_evals(self, results: Iterable[EvalResult]) -> None:
        for result in results:
            self._evals[result.adapter].answered(result)
            if result.error:
                log.warning("evaluation of %s@v%d failed: %s", result.adapter, result.version, result.error)
            else:
                self._recorder.evaluation(result)

    def shutdown(self) -> None:
        """End the controller."""
        self._client.shutdown()

    def close(self) -> None:
        self._client.close()
