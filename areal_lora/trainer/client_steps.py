"""What the record of a client's step says: of the passes of its window, and of the step itself. Only what is known.

A client has no rewards and no groups here, and the versions that sampled its tokens are not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.trace import Spans
from areal_lora.operations.messages import OptimStep, Pass, Scored, Stepped
from areal_lora.types import AdapterRef


@dataclass(slots=True)
class Window:
    """Sums over the passes with gradients since the step before.

    ``targets`` are tokens whose weight is not 0, ``loss`` is the sum of the losses.
    """

    tokens: int = 0
    sequences: int = 0
    targets: int = 0
    loss: float = 0.0

    def add(self, asked: Pass, scored: Scored) -> None:
        """A pass was carried out; one without gradients is not part of what a step learns."""
        if not asked.backward:
            return
        self.tokens += sum(len(datum.tokens) // 4 for datum in asked.data)
        self.sequences += len(asked.data)
        self.targets += sum(int(np.count_nonzero(np.frombuffer(datum.weights, "<f4"))) for datum in asked.data)
        self.loss += scored.loss


def step_record(
    before: AdapterRef, window: Window, step: OptimStep, outcome: Stepped, spans: Spans, time_s: float
) -> StepRecord:
    """The record of the step that began at ``before``. The loss is that of a target, as a mean."""
    seconds = spans.seconds
    return StepRecord(
        adapter=before.name,
        step=outcome.step if outcome.skipped else outcome.step - 1,
        version=before.version,
        time_s=time_s,
        by_client=True,
        taken=not outcome.skipped,
        loss=window.loss / window.targets if window.targets else None,
        grad_norm=None if outcome.skipped else outcome.grad_norm,
        lr=step.lr,
        n_tokens=window.tokens,
        n_sequences=window.sequences,
        n_targets=window.targets,
        step_s=spans.total_s,
        train_s=seconds.get("train", 0.0),
        checkpoint_copy_s=seconds.get("checkpoint_copy", 0.0),
        publish_pack_s=seconds.get("publish_pack", 0.0),
    )
