"""From the rewards of a batch to the advantage of every trained token.

::

    reward -> length penalty -> KL divergence -> advantage of the sample -> its tokens           -> normalised
                                                 reward of the last token -> values of a critic -> normalised

Advantages of samples are pure functions, one row each in `ADVANTAGES`: of the `Samples` of a whole batch to [S]
float64. All steps see the whole batch, on every rank the same one, so a result depends neither on the order of the
samples nor on packing, data-parallel ranks or micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from areal_lora.algorithms.losses import Estimator, sequence_sums, spread, token_counts
from areal_lora.errors import AlignmentError
from areal_lora.types import TrainBatch

EPS = 1e-6  # added to a standard deviation
BLOCK = 128  # tokens that `discounted_sums` adds up at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a batch, each counted once however many sequences it has.

    ``lengths`` are trained tokens. ``baselines`` are the rewards of greedy answers to the same prompts. ``parts`` are
    the rewards whose sum with ``weights`` is the whole, NaN for an answer to which one does not apply.
    """

    rewards: Tensor  # [S] float64
    group_ids: Tensor  # [S] int64
    lengths: Tensor  # [S] float64
    baselines: Tensor | None = None  # [S] float64
    parts: Tensor | None = None  # [S, C] float64
    weights: Tensor | None = None  # [C] float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """One row of the table.

    ``whitened``: the advantages of the batch's trained tokens are brought to mean 0 and standard deviation 1, after a
    KL divergence in the reward was taken off each token. ``critic``: ``of`` is the reward of the last token, from which
    `gae` computes each token's advantage with a critic's values.
    """

    of: Callable[[Samples], Tensor]
    whitened: bool = False
    critic: bool = False


def _group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum of ``values`` [S] over each sample's group. [S]"""
    groups, index = torch.unique(group_ids, return_inverse=True)  # [S]
    return values.new_zeros(len(groups)).index_add(0, index, values)[index]


def _group_size(samples: Samples) -> Tensor:
    return _group_sums(torch.ones_like(samples.rewards), samples.group_ids)


def dr_grpo(samples: Samples) -> Tensor:
    """``r - group mean``: Dr. GRPO (Liu et al., arXiv 2503.20783), section 3.2."""
    return samples.rewards - _group_sums(samples.rewards, samples.group_ids) / _group_size(samples)


def grpo(samples: Samples) -> Tensor:
    """``(r - group mean) / (group std + eps)``: GRPO, DeepSeekMath (Shao et al., arXiv 2402.03300), section 4.1.2.

    The standard deviation is the unbiased one. A group whose rewards are all equal gets exactly 0.
    """
    centred = dr_grpo(samples)
    squares = _group_sums(centred.square(), samples.group_ids)
    std = (squares / (_group_size(samples) - 1).clamp_min(1)).sqrt()
    return torch.where(_uniform(samples), torch.zeros_like(centred), centred / (std + EPS))


def gdpo(samples: Samples) -> Tensor:
    """`grpo` of each reward, their sum with the weights, then `batch`: GDPO (Liu et al., arXiv 2601.05242), section 3.

    Answers with equal sums of different rewards keep different advantages. A reward compares the answers to which it
    applies. With a single reward it is `grpo`, then `batch`.
    """
    parts, weights = samples.parts, samples.weights
    if parts is None or weights is None:
        parts, weights = samples.rewards[:, None], samples.rewards.new_ones(1)
    total = torch.zeros_like(samples.rewards)
    for part, weight in zip(parts.unbind(1), weights, strict=True):
        on = ~part.isnan()
        total[on] += weight * grpo(replace(samples, rewards=part[on], group_ids=samples.group_ids[on]))
    return batch(replace(samples, rewards=total))


def maxrl(samples: Samples) -> Tensor:
    """``(r - group mean) / group mean``: MaxRL (Tajwar et al., arXiv 2602.02710), for rewards of 0 and 1.

    The policy gradient of ``log p``, p the chance of a correct answer, to the order of the group's size: rare
    successes count more than with the standard deviation. 0 in a group without a positive mean.
    """
    mean = _group_sums(samples.rewards, samples.group_ids) / _group_size(samples)
    return torch.where((mean <= 0) | _uniform(samples), 0.0, (samples.rewards - mean) / mean)


def _uniform(samples: Samples) -> Tensor:
    """Whether all rewards of the sample's group are equal. [S]"""
    groups, index = torch.unique(samples.group_ids, return_inverse=True)
    blank, rewards = samples.rewards.new_zeros(len(groups)), samples.rewards
    lowest, highest = (blank.scatter_reduce(0, index, rewards, way, include_self=False) for way in ("amin", "amax"))
    return (lowest == highest)[index]


def rloo(samples: Samples) -> Tensor:
    """``r - mean of the group's others``: RLOO (Ahmadian et al., arXiv 2402.14740), equation 8."""
    size = _group_size(samples)
    others = (_group_sums(samples.rewards, samples.group_ids) - samples.rewards) / (size - 1).clamp_min(1)
    return torch.where(size > 1, samples.rewards - others, torch.zeros_like(others))


def opo(samples: Samples) -> Tensor:
    """``r - sum(l r) / sum(l)`` over the group, l an answer's length: OPO (Hao et al., arXiv 2505.23585), section 3.

    The baseline of least variance, if the squared norm of an answer's gradient grows with its length.
    """
    weighted = _group_sums(samples.lengths * samples.rewards, samples.group_ids)
    return samples.rewards - weighted / _group_sums(samples.lengths, samples.group_ids).clamp_min(1)


def gpg(samples: Samples) -> Tensor:
    """``alpha (r - group mean)``: GPG (Chu et al., arXiv 2504.02546), section 3, with F_norm = 1.

    ``alpha = S / (S - M)`` makes up for the M samples of groups with equal rewards, which have no gradient.
    """
    n, silent = len(samples.rewards), int(_uniform(samples).sum())
    return dr_grpo(samples) * (n / (n - silent) if silent < n else 0.0)


def reward(samples: Samples) -> Tensor:
    """``r``, normalised over the batch's tokens afterwards: REINFORCE++ (Hu et al., arXiv 2501.03262), section 3.

    For `gae`, the reward of an answer's last token: PPO (Schulman et al., arXiv 1707.06347), equation 11.
    """
    return samples.rewards


def batch(samples: Samples) -> Tensor:
    """``(r - batch mean) / (batch std + eps)``, the unbiased standard deviation: REINFORCE with a batch baseline.

    Williams, "Simple statistical gradient-following algorithms", 1992; the mean over all samples is the baseline.
    """
    return _over_batch_std(samples.rewards - samples.rewards.mean(), samples.rewards)


def group_mean_batch_std(samples: Samples) -> Tensor:
    """``(r - group mean) / (batch std + eps)``: Lite PPO (Liu et al., arXiv 2508.08221), section 4."""
    return _over_batch_std(dr_grpo(samples), samples.rewards)


def remax(samples: Samples) -> Tensor:
    """``r - r of the greedy answer``: ReMax (Li et al., arXiv 2310.10505), its greedy baseline.

    Raises AlignmentError for a sample without a baseline.
    """
    if samples.baselines is None or not bool(samples.baselines.isfinite().all()):
        raise AlignmentError("a group of the batch has no greedy answer to compare with: its workflow gave none")
    return samples.rewards - samples.baselines


def none(samples: Samples) -> Tensor:
    """0: `Shaping.kl_own` alone is trained on, the reverse KL divergence of MiniLLM (Gu et al., arXiv 2306.08543)."""
    return 0.0 * samples.rewards


def _over_batch_std(values: Tensor, rewards: Tensor) -> Tensor:
    """Divide [S] by the standard deviation of all rewards; 0 where these are all equal."""
    if bool((rewards == rewards[:1]).all()):
        return torch.zeros_like(values)
    return values / (rewards.std() + EPS)


ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage(of=grpo),
    "dr_grpo": Advantage(of=dr_grpo),
    "gdpo": Advantage(of=gdpo),
    "maxrl": Advantage(of=maxrl),
    "rloo": Advantage(of=rloo),
    "opo": Advantage(of=opo),
    "gpg": Advantage(of=gpg),
    "reinforce_pp": Advantage(of=reward, whitened=True),
    "reinforce_pp_baseline": Advantage(of=dr_grpo, whitened=True),
    "batch": Advantage(of=batch),
    "group_mean_batch_std": Advantage(of=group_mean_batch_std),
    "remax": Advantage(of=remax),
    "gae": Advantage(of=reward, whitened=True, critic=True),
    "none": Advantage(of=none),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Discount:
    """``gamma`` of a token's reward, ``lam`` of a later token's surprise: see `gae`."""

    gamma: float
    lam: float


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, discount: Discount) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, Schulman et al. (arXiv 1506.02438), equation 16. Returns advantages, returns.

    All are packed [T] of trained tokens only: entry t describes the action that samples token t, ``values[t]`` of
    the state before it. ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; the value
    after a sequence's last token is 0. Returns are ``A_t + V_t``.
    """
    following = values.roll(-1).index_fill(0, (cu_seqlens[1:] - 1)[cu_seqlens.diff() > 0], 0.0)
    delta = rewards + discount.gamma * following - values
    advantages = discounted_sums(delta, cu_seqlens, discount.gamma * discount.lam)
    return advantages, advantages + values


def discounted_sums(values: Tensor, cu_seqlens: Tensor, factor: float = 1.0) -> Tensor:
    """``y_t = x_t + factor y_{t+1}`` within each sequence: with factor 1 the sum from t to the end. Packed [T].

    Blocks of each sequence at once, as products with a triangular matrix; the sums of whole blocks, by which they are
    joined, are found in the same way.
    """
    lengths = cu_seqlens.diff()
    blocks = (lengths + BLOCK - 1) // BLOCK  # [N]
    bounds = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
    at = torch.arange(values.numel(), device=values.device)
    at += (BLOCK * bounds[:-1] - cu_seqlens[:-1]).repeat_interleave(lengths)  # each token's place among padded blocks
    padded = values.new_zeros(BLOCK * int(bounds[-1])).index_copy_(0, at, values).view(-1, BLOCK)
    place = torch.arange(BLOCK, device=values.device)
    factors = (factor ** (place[:, None] - place).clamp_min(0).to(values.dtype)).tril()
    out = padded @ factors
    if blocks.numel() and int(blocks.max()) > 1:
        following = discounted_sums(out[:, 0], bounds, factor**BLOCK).roll(-1)
        following[(bounds[1:] - 1)[blocks > 0]] = 0.0
        out += following[:, None] * factor ** (BLOCK - place).to(values.dtype)
    return out.view(-1)[at]


def sample_rewards(rewards: Tensor, sample_ids: Tensor) -> Tensor:
    """Each sample's reward once, however many sequences it has. [S]"""
    return rewards[find_samples(sample_ids)[0]]


def find_samples(sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first sequence of every sample [S], and every sequence's sample [N]."""
    _, index = torch.unique(sample_ids, return_inverse=True)
    order = torch.arange(index.numel(), device=index.device)
    first = order.new_full((int(index.max()) + 1,), index.numel())
    return first.scatter_reduce(0, index, order, reduce="amin"), index


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is taken off a reward before advantages are computed.

    ``kl_coef`` is 0 where neither reward nor advantage holds a KL divergence. With ``kl_own`` that of a token is taken
    off its advantage alone: on-policy distillation (Lu et al., Thinking Machines, 2025). An answer of more than
    ``overlong_from`` tokens loses a part of ``overlong_penalty``, one of ``max_new_tokens`` all of it. ``discount`` is
    for a critic's values. ``weights``: of rewards by name; empty: each part of the only reward counts once (`_parts`).
    """

    kl: Estimator
    kl_coef: float
    kl_own: bool = False
    overlong_from: float
    overlong_penalty: float
    max_new_tokens: int
    discount: Discount
    weights: Mapping[str, float] = field(default_factory=dict)


def overlong_penalty(lengths: Tensor, shaping: Shaping) -> Tensor:
    """Soft overlong punishment, DAPO (Yu et al., arXiv 2503.14476), equation 13: what an answer loses. [S] >= 0.

    Equation 13 has ``L_max`` = ``max_new_tokens`` and ``L_cache`` = ``max_new_tokens - overlong_from``.
    """
    buffer = shaping.max_new_tokens - shaping.overlong_from
    if buffer <= 0:
        return torch.zeros_like(lengths, dtype=torch.float64)
    beyond = (lengths.double() - shaping.overlong_from) / buffer
    return shaping.overlong_penalty * beyond.clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """``advantages`` of a batch's tokens, and with a critic what its values should have been; 0 off the mask."""

    advantages: Tensor  # [T] fp32
    returns: Tensor | None = None  # [T] fp32


def token_credit(advantage: Advantage, shaping: Shaping, batch: TrainBatch) -> Credit:
    """Advantages of every trained token, and returns for a critic.

    A KL divergence in the reward is that of the policy that sampled the token from the reference. It is taken off
    the sample's reward, or, for a ``whitened`` advantage, off each token as the sum from the token to the end. With a
    critic it is a cost of the token itself; with ``kl_own`` it is taken off the finished advantage. Given answers have
    no credit, and are not compared with sampled ones.
    """
    mask, cu_seqlens = batch.loss_mask, batch.cu_seqlens
    if bool(batch.given.all()):  # `annotate` has scored neither reference nor values
        return Credit(advantages=torch.zeros_like(mask, dtype=torch.float32))
    if bool(batch.given.any()):
        mask = mask & ~spread(batch.given, cu_seqlens, batch.n_tokens)
    first, sample = find_samples(batch.sample_ids)

    def per_sample(values: Tensor) -> Tensor:
        return values.new_zeros(first.numel()).index_add_(0, sample, values)

    counts = token_counts(mask, cu_seqlens)
    lengths = per_sample(counts.double())
    rewards = batch.rewards.double()[first] - overlong_penalty(lengths, shaping)
    cost = _kl_cost(shaping, batch, mask) if shaping.kl_coef else None
    kl, own = (None, cost) if shaping.kl_own else (cost, None)
    if kl is not None and not (advantage.whitened or advantage.critic):
        rewards = rewards - per_sample(sequence_sums(kl, cu_seqlens))
    sampled = ~batch.given[first]
    compared = Samples(
        rewards=rewards[sampled],
        group_ids=batch.group_ids[first][sampled],
        lengths=lengths[sampled],
        baselines=None if batch.baselines is None else batch.baselines.double()[first][sampled],
        **_parts(shaping.weights, batch, first[sampled]),
    )
    per_sequence = torch.zeros_like(rewards)
    per_sequence[sampled] = advantage.of(compared)
    values, returns = per_sequence[sample], None
    if advantage.critic:
        per_token, returns = _by_critic(values, kl, shaping.discount, batch, mask)
        per_token = whiten(per_token, per_token[mask]) if advantage.whitened else per_token
    elif advantage.whitened and kl is not None:
        per_token = spread(values, cu_seqlens, batch.n_tokens) - discounted_sums(kl, cu_seqlens)
        per_token = whiten(per_token, per_token[mask])
    else:  # a number of each sequence: rounded before each token has it
        values = whiten(values, values.repeat_interleave(counts)) if advantage.whitened else values
        per_token = spread(values if own is not None else values.float(), cu_seqlens, batch.n_tokens)
    if own is not None:
        per_token = per_token - own
    return Credit(
        advantages=per_token.float().masked_fill_(~mask, 0.0), returns=None if returns is None else returns.float()
    )


def _parts(weights: Mapping[str, float], batch: TrainBatch, samples: Tensor) -> dict[str, Tensor]:
    """`Samples.parts` and weights of ``samples``; empty without any, or if those of an only reward are metrics.

    They are its parts if more answers with several add up to it than answers with any do not: a single one does so by
    chance, such as one turn for a reward of 1. What the others lack, such as a penalty without a name, is one more.
    So is the whole reward of a sample to which none of several applies: its environment has given it.
    """
    names = [name for name in batch.component_names if name in weights or not weights]
    if batch.components is None or not names:
        return {}
    parts = batch.components.double()[samples][:, [batch.component_names.index(name) for name in names]]
    rewards, factors = batch.rewards.double()[samples], [*(weights.get(name, 1.0) for name in names), 1.0]
    rest = torch.where(parts.isnan().all(1), rewards, torch.nan)
    if not weights:
        parts = parts.nan_to_num()
        total, n_parts = parts.sum(1), (parts != 0).sum(1)
        adds_up = torch.isclose(total, rewards, rtol=1e-5, atol=1e-5)
        differ = int((~adds_up & (n_parts > 0)).sum())
        if differ and int((adds_up & (n_parts > 1)).sum()) <= differ:
            return {}
        rest = torch.where(adds_up, 0.0, rewards - total)
    if rest.isnan().all():  # a sum over the parts is finite where each reward applies
        return {"parts": parts, "weights": parts.new_tensor(factors[:-1])}
    return {"parts": torch.cat([parts, rest[:, None]], 1), "weights": parts.new_tensor(factors)}


def _by_critic(
    rewards: Tensor, cost: Tensor | None, discount: Discount, batch: TrainBatch, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`gae` over the tokens of ``mask``: advantages and returns [T] float64, 0 off it.

    ``rewards`` [N] belong to each sequence's last token, but for what its turns have earned; a ``cost`` [T] is taken
    off the tokens' own. A turn reward of the first token was earned before the sequence, and is none of its tokens'.
    What lies between two answers of a conversation is no action: the next token that was sampled follows.
    """
    assert batch.values is not None, "annotate() scores with the critic before advantages are computed"
    counts = token_counts(mask, batch.cu_seqlens)
    ends, known = counts.cumsum(0), batch.values.double()[mask]
    per_token = torch.zeros_like(known) if cost is None else -cost[mask]
    if batch.turn_rewards is not None:
        turns, before = torch.where(mask, batch.turn_rewards.double(), 0.0), batch.turn_rewards[batch.cu_seqlens[:-1]]
        per_token, rewards = per_token + turns[mask], rewards - before - sequence_sums(turns, batch.cu_seqlens)
    per_token[(ends - 1)[counts > 0]] += rewards[counts > 0]
    bounds = torch.cat([ends.new_zeros(1), ends])
    found = gae(per_token, known, bounds, discount)
    advantages, returns = (known.new_zeros(len(mask)).masked_scatter_(mask, values) for values in found)
    return advantages, returns


def _kl_cost(shaping: Shaping, batch: TrainBatch, on: Tensor) -> Tensor:
    """The coefficient times the KL divergence of each token, [T] float64, 0 off the mask ``on``."""
    assert batch.ref_logprobs is not None, "annotate() scores the reference before advantages are computed"
    policy, reference = (torch.where(on, x.double(), 0.0) for x in (batch.rollout_logprobs, batch.ref_logprobs))
    return shaping.kl_coef * shaping.kl(policy, reference)


def whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """``(x - mean) / (std + eps)``, mean and biased standard deviation of the tokens ``chosen``."""
    if not chosen.numel():
        return values
    return (values - chosen.mean()) / (chosen.std(correction=0) + EPS)
