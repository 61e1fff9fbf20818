"""The trainer's client with the waits of a test: for one batch, and for one evaluation."""

from __future__ import annotations

from typing import Any

from areal_lora.errors import RolloutError
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.client import ControllerClient
from areal_lora.types import AdapterRef


class PatientClient(ControllerClient):
    """Results of evaluations that come while another one is awaited are kept for `wait_eval`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._results: dict[tuple[str, int, str], m.EvalResult] = {}

    def next_batch(self, adapter: str, step: int) -> m.Batch:
        """Raises RolloutError if the rollouts of ``adapter`` have failed."""
        wanted = (AdapterRef(name=adapter, version=step),)
        while isinstance(reply := self.poll(wanted), m.NotReady):
            continue
        if isinstance(reply, m.AdapterFailed):
            raise RolloutError(f"{reply.adapter}: {reply.reason}")
        return reply

    def wait_eval(self, ref: AdapterRef, tag: str) -> m.EvalResult:
        while True:
            for event in self.take_events():
                self._results[event.adapter, event.version, event.tag] = event
            if (found := self._results.pop((ref.name, ref.version, tag), None)) is not None:
                return found
            self.poll(())

    def lacking(self, adapter: str, step: int) -> m.Lacking:
        """What the adapter's next batch, of ``step``, lacks; there must not be one."""
        reply = self.poll((AdapterRef(name=adapter, version=step),), 0.2)
        assert isinstance(reply, m.NotReady)
        return reply.lacking[0]
