"""What is resident beside an adapter while it trains: its critic, and the version that is its KL reference.

::

    math             trained, published
    math/critic      trained beside it: value head, rank, moments and clock of its own; never published
    math/reference   a frozen copy of an earlier version of math

Both are adapters of the same base, which is held once. Their state is in the checkpoints of the adapter that they
belong to. A ``/`` is in no name that a configuration can give. In a training step the critic takes one optimizer step
on each minibatch (`improve`), on values and returns of `learn.annotate`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from areal_lora.algorithms.losses import denominator, spread, token_weights, value_loss
from areal_lora.checkpoint.state import AdapterState, Companion, Manifest, read_tensors
from areal_lora.engine.base import LossFn, LossSums, MicroBatch
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import AdapterSpec, TrainBatch

CRITIC, REFERENCE = "critic", "reference"
RATE = 10.0
"""Learning rate of a critic over that of its policy, where none is configured: usual values are 5 to 20."""
VALUE_CLIP = 0.2
"""A critic's loss sees values at most so far from those before the step."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The adapter that gives values. Its learning rate is ``rate`` times that of the policy."""

    spec: AdapterSpec
    rate: float

    @property
    def name(self) -> str:
        return self.spec.name


def critic_of(adapter: Adapter) -> Critic | None:
    """The critic of the adapter's algorithm, with its rank, scale and modules; None if it has none."""
    if not adapter.algorithm.critic:
        return None
    config, lr = adapter.config, adapter.config.algorithm.critic_lr
    spec = replace(adapter.spec, name=f"{adapter.name}/{CRITIC}", value_head=True)
    return Critic(spec=spec, rate=lr / config.optimizer.lr if lr else RATE)


def reference_of(adapter: Adapter) -> str | None:
    """The name of the resident reference; None where the reference is the base."""
    return f"{adapter.name}/{REFERENCE}" if adapter.algorithm.reference else None


def start(engine: AdapterEngine, adapter: Adapter, seed: int) -> None:
    """Make the companions of ``adapter`` resident: a new critic, its present weights as the reference."""
    if critic := critic_of(adapter):
        engine.add_adapter(critic.spec, adapter.config.optimizer, seed)
    if reference := reference_of(adapter):
        engine.freeze_copy(adapter.name, reference)


def renew(engine: AdapterEngine, adapter: Adapter, version: int) -> None:
    """Make ``version``, which the adapter's weights are now, the reference if it is its turn."""
    terms, reference = adapter.algorithm.reference, reference_of(adapter)
    if terms and reference and terms.renewed_at(version):
        engine.freeze_copy(adapter.name, reference)


def resident(adapter: Adapter) -> dict[str, str]:
    """The names of the companions in the engine, by role."""
    critic, reference = critic_of(adapter), reference_of(adapter)
    return ({CRITIC: critic.name} if critic else {}) | ({REFERENCE: reference} if reference else {})


def states(engine: AdapterEngine, adapter: Adapter) -> dict[str, tuple[AdapterState, Companion]]:
    """Host copies of the companions' tensors by role, and what a manifest has of them. Collective."""
    found = {}
    for role, name in resident(adapter).items():
        state = engine.export_state(name)
        found[role] = state, Companion(spec=engine.resident(name).spec, step=state.step)
    return found


def load(engine: AdapterEngine, adapter: Adapter, manifest: Manifest, folder: Path) -> None:
    """Restore the companions, which are resident, from a checkpoint.

    A critic that the checkpoint does not have starts as a new one. Raises ConfigError for one of another shape, and
    for a reference that the checkpoint does not have: its version cannot be known any more.
    """
    for role, name in resident(adapter).items():
        kept = manifest.companions.get(role)
        if kept is None and role == REFERENCE:
            raise ConfigError(
                "algorithm.reference",
                f"{folder} was written without a reference, and the version at the start of the run is not known",
                "set it to base, choose another run.name, or start over with --fresh",
            )
        if kept is None:
            log.warning("%s has no critic: %s gets a new one", folder, adapter.name)
            continue
        spec = engine.resident(name).spec
        if replace(kept.spec, base_model=spec.base_model) != spec:
            raise ConfigError(
                "algorithm.kind",
                f"the {role} in {folder} has rank {kept.spec.rank} and alpha {kept.spec.alpha:g}, not {spec.rank} and "
                f"{spec.alpha:g}",
                "choose another run.name, or start over with --fresh",
            )
        engine.load_state(name, read_tensors(folder, manifest, role), kept.step)


def make_value_loss(adapter: Adapter) -> LossFn:
    """Build the objective of the adapter's critic for the engine. Given answers have no share in it."""
    reduction = adapter.config.algorithm.reduction

    def loss(micro: MicroBatch, values: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.values is not None, "annotate() comes before learning"
        assert micro.returns is not None, "annotate() comes before learning"
        sums = value_loss(
            VALUE_CLIP,
            values=values,
            before=micro.values,
            returns=micro.returns,
            weights=token_weights(trained_mask(micro, adapter) & sampled_mask(micro), micro.cu_seqlens, reduction),
        )
        return LossSums(loss=sums.loss, stats=sums.stats)

    return loss


def improve(engine: AdapterEngine, adapter: Adapter, minibatch: TrainBatch, lr: float) -> dict[str, float]:
    """Take one optimizer step of the adapter's critic, if it has one. Collective. Returns sums, see `value_loss`.

    ``lr`` is the policy's. Without a sampled token nothing happens: momentum alone would move the critic.
    """
    critic, config = critic_of(adapter), adapter.config
    sampled = trained_mask(minibatch, adapter) & sampled_mask(minibatch)
    if critic is None or not bool(sampled.any()):
        return {}
    own = replace(minibatch, adapters=(critic.name,) * minibatch.n_sequences)
    sums = engine.forward_backward(own, make_value_loss(adapter))
    reduction, longest = config.algorithm.reduction, config.sampling.max_new_tokens
    divisor = denominator(sampled, minibatch.cu_seqlens, reduction, longest)
    stats = engine.optim_step(critic.name, divisor, lr * critic.rate).values
    named = {name: value for name, value in sums.items() if name != "loss"}
    return named | {"value_steps": 1.0, "value_grad_norms": stats["grad_norm"], "value_skipped": stats["skipped"]}


def trained_mask(batch: TrainBatch, adapter: Adapter) -> Tensor:
    """[T] bool: the tokens with a weight in the loss; `mask_truncated` gives truncated samples none."""
    if batch.truncated is None or not adapter.config.algorithm.mask_truncated:
        return batch.loss_mask
    return batch.loss_mask & ~spread(batch.truncated, batch.cu_seqlens, batch.n_tokens)


def sampled_mask(batch: TrainBatch) -> Tensor:
    """[T] bool: the mask without given answers."""
    return batch.loss_mask & ~spread(batch.given, batch.cu_seqlens, batch.n_tokens)
