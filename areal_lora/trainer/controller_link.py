"""Rank 0's link to the rollout controller: batches, evaluations, and what a checkpoint keeps of both.

next_work          a batch and its ledger snapshot, the end of an adapter, evaluations that finished meanwhile
evaluate_if_due    requests an evaluation, which starts when the version is active
state              -> `ControllerState` of an adapter, for its checkpoint
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_runs
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.families.shape import read_shape
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.client import SHORT_POLL_S, ControllerClient, WaitingLines
from areal_lora.trainer.adapter import Adapter, ControllerState
from areal_lora.trainer.recording import Recorder
from areal_lora.trainer.work import Finish, RolloutFault, TrainOn, Work
from areal_lora.types import AdapterRef

log = get_logger(__name__)

EVAL_TAG = "held-out"


def evaluation_due(version: int, newest: int, *, every_steps: int, last: int, saved: bool) -> bool:
    """Whether ``version`` is to be evaluated, where ``newest`` is the newest that was requested (-1: none).

    Due are version 0, the ``last`` one and every multiple of ``every_steps``, or in place of a multiple that was passed
    over the first later version that is ``saved``: others cannot be kept.
    """
    if every_steps == 0:
        return version in (0, last)
    beyond = version % every_steps
    return version >= last or (version - beyond > newest and (saved or not beyond))


@dataclass(slots=True, kw_only=True)
class EvalTracker:
    """The evaluations of one adapter: results of the first set by version, versions without an answer, newest.

    A version that was retired before its result does not count as the newest: a later one is evaluated in its place.
    """

    results: dict[int, Evaluation] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    newest: int = -1

    @classmethod
    def restored(cls, state: ControllerState) -> "EvalTracker":
        newest = max(state.evaluations.keys() | state.pending, default=-1)
        return cls(results=dict(state.evaluations), pending=set(state.pending), newest=newest)


class ControllerLink:
    """One per run, on rank 0. ``restored`` are the adapters and what their checkpoints kept (empty without one)."""

    def __init__(
        self, config: Config, client: ControllerClient, recorder: Recorder, restored: dict[str, ControllerState]
    ) -> None:
        self._runs, self._client, self._recorder = adapter_runs(config), client, recorder
        self._evals = {name: EvalTracker.restored(state) for name, state in restored.items()}
        self._ledgers = {name: state.ledger for name, state in restored.items()}
        self._moved: dict[str, tuple[int, int]] = {}  # of the newest reply
        replays = config.behaviour.router_replay == "rollout"
        self._routes = read_shape(Path(config.model.folder)).routes if replays else None

    def state(self, adapter: str) -> ControllerState:
        """A version that is measured in place of a retired one is pending: its checkpoint is kept."""
        tracker, (retired, measured) = self._evals[adapter], self._moved.get(adapter, (-1, -1))
        pending = frozenset(measured if version == retired else version for version in tracker.pending)
        return ControllerState(ledger=self._ledgers[adapter], evaluations=dict(tracker.results), pending=pending)

    def next_work(
        self,
        of_turns: Callable[[], Sequence[AdapterRef]],
        draining: Collection[str],
        interruption: Callable[[], Work | None],
        wait_s: float = SHORT_POLL_S,
    ) -> Work:
        """Wait for a batch of the first adapter of ``of_turns`` that has one, consumed at that version.

        Or until an adapter of ``draining`` has no evaluation pending, rollouts of a wanted one fail, or there is an
        ``interruption``. Both are called every ``wait_s``. Evaluations that finish meanwhile are recorded.
        """
        lines = WaitingLines()
        shown = ""
        while True:
            drained = next((name for name in draining if not self._evals[name].pending), None)
            if drained is not None:
                return Finish(adapter=drained)
            wanted = of_turns()
            if (waiting := self._waiting(wanted, draining)) != shown:
                shown = waiting
                self._recorder.status(waiting)
            reply = self._client.poll(wanted, wait_s)
            self.record_evals(self._client.take_events())
            if isinstance(reply, m.AdapterFailed):
                return RolloutFault(adapter=reply.adapter, reason=reply.reason, exit_code=reply.exit_code)
            self._moved = reply.moved
            if isinstance(reply, m.Batch):
                return self._received(reply)
            self._recorder.beat()
            if (other := interruption()) is not None:
                return other
            if notes := lines.report(reply.lacking):
                self._recorder.status("; ".join([waiting, *notes]))

    def _waiting(self, wanted: Sequence[AdapterRef], draining: Collection[str]) -> str:
        """The status line of a wait."""
        if len(wanted) == 1:
            return f"step {wanted[0].version}: waiting for rollouts of {wanted[0].name}"
        if wanted:
            return f"waiting for rollouts of {', '.join(f'{ref.name} (step {ref.version})' for ref in wanted)}"
        if not draining:
            return "no adapter trains"
        first = {name: min(self._evals[name].pending) for name in draining}
        refs = (AdapterRef(name=name, version=version) for name, version in first.items())
        return f"waiting for the evaluation of {', '.join(map(str, refs))}"

    def _received(self, batch: m.Batch) -> TrainOn:
        ref = AdapterRef(name=batch.adapter, version=batch.step)
        self._recorder.status(f"step {ref.version}: training {ref.name}")
        self._ledgers[ref.name] = batch.snapshot
        self._recorder.batch(batch)
        return TrainOn(adapter=ref.name, batch=PackedGroups.of(batch.groups, self._routes))

    def join(self, adapter: Adapter, version: int, kept: ControllerState) -> str:
        """The controller starts to roll out for ``adapter`` at ``version``; returns why it cannot, or nothing."""
        problem = self._client.join(adapter.name, adapter.config.model_dump_json().encode(), version, kept.ledger)
        if not problem:
            self._runs[adapter.name] = adapter.run
            self._evals[adapter.name], self._ledgers[adapter.name] = EvalTracker.restored(kept), kept.ledger
        return problem

    def pause(self, adapter: str, paused: bool) -> None:
        """No group of ``adapter`` is issued; or again."""
        self._client.pause(adapter, paused)

    def end(self, adapter: str, reason: str = "") -> None:
        """Nothing more is needed of ``adapter``: the controller stops its rollouts, for whatever reason."""
        for of_adapters in (self._evals, self._ledgers, self._runs, self._moved):
            of_adapters.pop(adapter, None)
        self._client.end(adapter)

    def evaluate_if_due(self, ref: AdapterRef, *, saved: bool) -> None:
        """Request a held-out evaluation of ``ref`` if due and none is pending; of the last version in any case.

        ``saved``: it has a checkpoint, or one in progress.
        """
        tracker = self._evals[ref.name]
        run = self._runs[ref.name]
        every, last = run.eval_every, run.steps
        if evaluation_due(ref.version, tracker.newest, every_steps=every, last=last, saved=saved):
            if not tracker.pending or ref.version >= last:
                self.request_eval(ref)
            elif ref.version % every == 0:
                until = (
                    f"until that of v{min(tracker.pending)} is done, and will use the next version with a checkpoint"
                )
                log.info("the evaluation of %s is postponed %s", ref, until)

    def request_eval(self, ref: AdapterRef) -> None:
        tracker = self._evals[ref.name]
        tracker.pending.add(ref.version)
        tracker.newest = max(tracker.newest, ref.version)
        self._client.request_eval(ref, EVAL_TAG)

    def record_evals(self, results: Iterable[m.EvalResult]) -> None:
        for result in results:
            tracker = self._evals.get(result.adapter, EvalTracker())  # its adapter may have ended
            tracker.pending.discard(result.version)
            for name, reason in result.failed.items():
                log.warning("evaluation %s of %s@v%d failed: %s", name, result.adapter, result.version, reason)
            for found in result.sets:
                tracker.newest = max(tracker.newest, found.version)  # a newer one may have been measured
                if found.order == 0:
                    figures = {"accuracy": found.accuracy, "reward_mean": found.reward_mean}
                    tracker.results[found.version] = Evaluation(**figures, measure=found.measure)
                self._recorder.evaluation(found)
            if result.retired:
                tracker.newest = max(tracker.results.keys() | tracker.pending, default=-1)

    def shutdown(self) -> None:
        """End the controller."""
        self._client.shutdown()

    def close(self) -> None:
        self._client.close()
