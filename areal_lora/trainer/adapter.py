"""One adapter in training: what it is (`Adapter`), and how far its training has come (`TrainingState`).

There is one `TrainingState` per adapter (contract C1). Other bookkeeping belongs to the object that needs it::

    Checkpointing       the newest version with a checkpoint
    AdapterPublishing   the publish in progress, the layout, the scores of the probe
    ControllerLink      ledger snapshot, evaluations       -> `ControllerState`, kept in the checkpoint
    Recorder            rates, statistics of the rollouts
    Trainer             the seconds of the step in progress
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_lora.algorithms.losses import adapted
from areal_lora.algorithms.mismatch import choose
from areal_lora.algorithms.registry import Algorithm, build_algorithm
from areal_lora.checkpoint.state import Evaluation
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import AdapterRun, adapter_run
from areal_lora.data.collate import scoring_batch
from areal_lora.data.prompts import TextTokenizer
from areal_lora.errors import ArealLoraError
from areal_lora.families.shape import read_shape
from areal_lora.tasks.datasets import load_samples
from areal_lora.types import AdapterPhase, AdapterRef, AdapterSpec, Correction, TrainBatch

TokenRows = list[list[int]]
SERVED = (AdapterPhase.PENDING, AdapterPhase.ACTIVE, AdapterPhase.DRAINING, AdapterPhase.PAUSED)
"""Phases in which an adapter has a place on the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The identity of an adapter, fixed for a run.

    ``run`` are its settings, with the run's in place of those it leaves out. ``probe`` are the sequences of the
    truth check (contract C6), ``base_commit`` is the revision of a base from the hub.
    """

    config: AdapterConfig
    run: AdapterRun
    spec: AdapterSpec
    algorithm: Algorithm
    probe: TrainBatch
    base_commit: str | None = None

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """State that training changes besides tensors. Only the loop changes it.

    ``version`` counts the training steps taken, one batch and one published version each; of an adapter that a client
    drives it is the number of the operation that made the weights. ``skipped_steps`` in a row had gradients that were
    not finite. ``kl_scale`` times the configured KL coefficient is in use, and ``correction`` where it is chosen by
    step. ``failure``: the error in phase FAILED.
    """

    adapter: Adapter
    version: int = 0
    phase: AdapterPhase = AdapterPhase.PENDING
    failure: ArealLoraError | None = None
    skipped_steps: int = 0
    kl_scale: float = 1.0
    correction: Correction = Correction.TRUNCATE

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.name, version=self.version)

    @property
    def tuned(self) -> Adapter:
        """The adapter with the KL coefficient and the behaviour correction of the version in training."""
        algorithm = self.adapter.algorithm.with_kl_scale(self.kl_scale).with_correction(self.correction)
        return replace(self.adapter, algorithm=algorithm)

    def advance(self, *, skipped: bool, kl: float | None, mismatch: float | None) -> None:
        """Count one training step; ``skipped`` if no optimizer step of it was taken.

        ``kl`` and ``mismatch``, mean |log w|, are of a token.
        """
        self.version += 1
        self.correction = choose(self.correction, mismatch)
        self.kl_scale = adapted(self.kl_scale, kl, self.adapter.algorithm.kl_target)
        self.skipped_steps = self.skipped_steps + 1 if skipped else 0

    @property
    def due_phase(self) -> AdapterPhase:
        """The phase that follows from the version."""
        return AdapterPhase.DRAINING if self.version >= self.adapter.run.steps else AdapterPhase.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """The part of an adapter's checkpoint for the rollout controller. Only rank 0 has it; it is empty on other ranks.

    ``ledger`` is the controller's snapshot once the step that made the version is consumed. ``evaluations`` are
    held-out figures by version, ``pending`` the versions whose evaluation was requested and has no answer yet.
    """

    ledger: bytes = b""
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict)
    pending: frozenset[int] = frozenset()


Restored = tuple[TrainingState, ControllerState]
"""What a checkpoint has besides tensors and random states."""


def build_adapter(config: Config, adapter: AdapterConfig, probe: TokenRows) -> Adapter:
    return Adapter(
        config=adapter,
        run=adapter_run(config, adapter),
        spec=adapter.spec(config.model.path),
        algorithm=build_algorithm(
            adapter.algorithm,
            minibatches=adapter.minibatches,
            max_new_tokens=adapter.sampling.max_new_tokens,
            given_steps=adapter.sft.steps,
            weights=adapter.weights_by_name,
        ),
        probe=scoring_batch(probe, adapter.name),
        base_commit=config.model.commit,
    )


PROBE_SEQUENCES, PROBE_TOKENS = 4, 32
"""Fixed sequences that trainer and server score after a publish, and their length: some milliseconds on any model."""


def probe_rows(config: Config, adapter: AdapterConfig, tokenizer: TextTokenizer) -> TokenRows:
    """The fixed sequences of the truth check (contract C6): the first problems with their gold answers.

    Without a task, any tokens; and in place of a problem of less than two tokens, whose text others write. No two start
    with the same token: experts that are equally good for a common start would be a tie in each of them (`probe.TIES`).
    """
    tokens = min(PROBE_TOKENS, config.rollout.max_model_len - 1)
    vocabulary, choose = read_shape(Path(config.model.folder)).vocab, random.Random(0)
    texts: TokenRows = [[]] * PROBE_SEQUENCES
    if not adapter.is_client:
        # Without the chat template: sequences that start with one system prompt would test the same tokens.
        samples = load_samples(adapter.task, "eval", first=PROBE_SEQUENCES)
        texts = [tokenizer.encode(s.prompt + s.gold, add_special_tokens=False) for s in samples]
    rows: TokenRows = []
    for text in texts:
        firsts = {row[0] for row in rows}
        for tried in (text, [choose.randrange(vocabulary) for _ in range(len(texts) + tokens)]):
            start = next((i for i, token in enumerate(tried) if token not in firsts), len(tried))
            if len(row := tried[start : start + tokens]) > 1:
                rows.append(row)
                break
    return rows
