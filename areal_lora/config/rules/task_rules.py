"""Rules about tasks, evaluation sets, and values of training that are seldom meant; no rows are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity
from areal_lora.config.sections.task import DatasetTask, TaskConfig, WordProblemsTask


def _tasks(config: Config) -> Iterator[tuple[str, TaskConfig]]:
    """All tasks with their keys: those that are trained on, and those of evaluation sets."""
    for i, adapter in enumerate(config.adapters):
        yield f"adapters.{i}.task", adapter.task
        for j, chosen in enumerate(adapter.evals):
            if chosen.task is not None:
                yield f"adapters.{i}.evals.{j}.task", chosen.task


def chat_template(config: Config, facts: Facts) -> Iterator[Finding]:
    """The format chat needs a chat template, and messages need the format chat."""
    for at, task in _tasks(config):
        chat = task.format.is_chat
        if chat and facts.chat_template is False:
            yield Finding(
                path=f"{at}.format.kind",
                reason=f"the tokenizer in {config.model.folder} has no chat template",
                fix="set it to template, or use an instruction-tuned model",
            )
        if isinstance(task, DatasetTask) and task.columns.messages is not None and not chat:
            yield Finding(
                path=f"{at}.columns.messages",
                reason="messages are written by a chat template, and task.format.kind is template",
                fix="set task.format.kind=chat",
            )


def columns_exist(config: Config, facts: Facts) -> Iterator[Finding]:
    """A task that is computed has no columns to name."""
    for i, adapter in enumerate(config.adapters):
        if adapter.sft.column is not None and isinstance(adapter.task, WordProblemsTask):
            yield Finding(
                path=f"adapters.{i}.sft.column",
                reason=f"{adapter.sft.column!r} names a column, and task.kind {adapter.task.kind} has none: its "
                "problems are computed",
                fix="leave it out to train on the computed answers, or use task.kind dataset",
            )


def sampling_is_trained(config: Config, facts: Facts) -> Iterator[Finding]:
    """Log-probabilities are those of the whole distribution: what restricts sampling is a bias."""
    for i, adapter in enumerate(config.adapters):
        sampling, at = adapter.sampling, f"adapters.{i}.sampling"
        if sampling.min_tokens > sampling.max_new_tokens:
            yield Finding(
                path=f"{at}.min_tokens",
                reason=f"{sampling.min_tokens} is more than max_new_tokens = {sampling.max_new_tokens}",
                fix="lower it, or raise max_new_tokens",
            )
        limits = (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0.0))
        for key, value, off in (*limits, ("min_tokens", sampling.min_tokens, 0)):
            if value != off:
                yield Finding(
                    path=f"{at}.{key}",
                    reason=f"{value:g} restricts sampling, and the trained log-probabilities do not know it",
                    fix=f"leave it at {off:g}, or accept the bias (docs/en/algorithms.md)",
                    severity=Severity.WARNING,
                )


LEAST_TEMPERATURE = 0.01
"""vLLM's minimum above 0."""


def eval_sets(config: Config, facts: Facts) -> Iterator[Finding]:
    longest = config.rollout.max_model_len
    for i, adapter in enumerate(config.adapters):
        for name, count in Counter(chosen.name for chosen in adapter.evals).items():
            if count > 1:
                yield Finding(
                    path=f"adapters.{i}.evals", reason=f"{count} sets are named {name!r}", fix="give each its own name"
                )
        for j, chosen in enumerate(adapter.evals):
            at = f"adapters.{i}.evals.{j}"
            if chosen.n_samples > 1 and chosen.temperature == 0:
                yield Finding(
                    path=f"{at}.temperature",
                    reason=f"at 0 all {chosen.n_samples} answers to a problem are the same",
                    fix="raise it, for example to 0.8, or set n_samples=1",
                )
            elif 0 < chosen.temperature < LEAST_TEMPERATURE:
                yield Finding(
                    path=f"{at}.temperature",
                    reason=f"vLLM's minimum above 0 is {LEAST_TEMPERATURE}",
                    fix="set it to 0 for greedy answers",
                )
            if chosen.max_new_tokens is not None and chosen.max_new_tokens >= longest:
                yield Finding(
                    path=f"{at}.max_new_tokens",
                    reason=f"{chosen.max_new_tokens} new tokens leave no room for a prompt in "
                    f"rollout.max_model_len = {longest}",
                    fix=f"lower it, or raise rollout.max_model_len above {chosen.max_new_tokens}",
                )


HIGHEST_LR, MOST_SEQUENCES = 0.1, 65_536
"""A hundred times the usual learning rate of LoRA with Adam; four times the largest published batches of RL."""


def seldom_meant(config: Config, facts: Facts) -> Iterator[Finding]:
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client:
            continue
        at, sampling, optimizer = f"adapters.{i}", adapter.sampling, adapter.optimizer
        if optimizer.lr > HIGHEST_LR:
            yield Finding(
                path=f"{at}.optimizer.lr",
                reason=f"{optimizer.lr:g} lets Adam change each weight by about this much in a step",
                fix="usual values are 1e-6 to 1e-3",
                severity=Severity.WARNING,
            )
        if (sequences := sampling.prompts_per_step * sampling.n_samples) > MOST_SEQUENCES:
            yield Finding(
                path=f"{at}.sampling.prompts_per_step",
                reason=f"a step samples {sequences:,} answers before it trains",
                fix=f"usual steps have at most {MOST_SEQUENCES:,}",
                severity=Severity.WARNING,
            )
        if adapter.minibatches <= sampling.prompts_per_step and sampling.prompts_per_step % adapter.minibatches:
            yield Finding(
                path=f"{at}.minibatches",
                reason=f"{adapter.minibatches} minibatches of {sampling.prompts_per_step} prompts are of unequal size",
                fix="choose a divisor of sampling.prompts_per_step",
                severity=Severity.WARNING,
            )
