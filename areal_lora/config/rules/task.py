"""Rules about tasks: what can be judged without reading their rows."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity
from areal_lora.config.task import DatasetTask, TaskConfig, WordProblemsTask


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
        asked = (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0.0))
        for key, value, off in (*asked, ("min_tokens", sampling.min_tokens, 0)):
            if value != off:
                yield Finding(
                    path=f"{at}.{key}",
                    reason=f"{value:g} restricts sampling, and the trained log-probabilities do not know it",
                    fix=f"leave it at {off:g}, or accept the bias (docs/en/algorithms.md)",
                    severity=Severity.WARNING,
                )
