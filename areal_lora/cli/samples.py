"""``areal-lora samples`` and ``conversations``: answers of a step with their rewards, and what agents exchanged."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.status import Adapter, Run, find_run, recorded_config
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.data.formatting import TextTokenizer
    from areal_lora.obs.metrics.records import RolloutSampleRecord, StepRecord
    from areal_lora.rollout.agent_api.turns import Turn
    from areal_lora.rollout.conversations import ConversationRecord


def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(metavar="K", min=0, help="the step; the newest if unset")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    adapter: Adapter = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="at most so many answers")] = 4,
) -> None:
    """Show the answers that were recorded for a step, its groups, drops and errors.

    `samples/` keeps a few answers of the first and the newest steps.
    """
    from areal_lora.obs.metrics.reader import iter_metrics
    from areal_lora.obs.metrics.records import RolloutSampleRecord, StepRecord

    folder = find_run(run)
    found: dict[int, list[RolloutSampleRecord]] = {}
    steps: dict[tuple[int, str], StepRecord] = {}
    for record in iter_metrics(folder):
        if adapter is not None and record.adapter != adapter:
            continue
        if isinstance(record, RolloutSampleRecord):
            found.setdefault(record.step, []).append(record)
        elif isinstance(record, StepRecord):
            steps[record.step, record.adapter] = record
    if not found:
        raise ConfigError(str(folder.samples), "there is no answer of a trained step", "wait for the end of a step")
    chosen = max(found) if step is None else step
    if chosen not in found:
        kept = f"{min(found)} to {max(found)}" if len(found) > 1 else str(max(found))
        raise ConfigError(f"--step {chosen}", "no answer of it is kept", f"choose among steps {kept}")
    answers = sorted(found[chosen], key=lambda s: s.reward) if worst else found[chosen]
    figures = [_step(steps[key]) for key in sorted(steps) if key[0] == chosen]
    print("\n\n".join([*figures, *(_answer(answer) for answer in answers[:count])]))


def _step(record: StepRecord) -> str:
    from areal_lora.obs.console import number, percent

    lines = [f"step {record.step} of {record.adapter}: reward {number(record.reward_mean)}"]
    if (equal := record.metrics.get("train/groups_equal")) is not None:
        lines[0] += f", {percent(equal)} of groups equal"
    for name, counts in (("dropped", record.dropped), ("retried", record.retried)):
        lines += [f"{name}: " + ", ".join(f"{key} {n}" for key, n in counts.items())] if counts else []
    return "\n".join([*lines, f"faults: {record.faults_text}"] if record.faults else lines)


def _answer(sample: RolloutSampleRecord) -> str:
    gold = "" if sample.gold is None else f", gold {sample.gold}"
    versions = ", ".join(f"v{version}" for version in sample.versions)
    head = f"== {sample.adapter}, step {sample.step}, {versions}: reward {sample.reward:g}{gold}"
    return f"{head}\n-- prompt\n{sample.prompt}\n-- answer\n{sample.completion}"


def conversations(
    run: Run,
    uid: Annotated[str | None, typer.Option(metavar="TEXT", help="only of problems whose id has this text")] = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="the last ones")] = 1,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="the trajectories' text too, as [v3|sampled by version 3]")
    ] = False,
) -> None:
    """Show the last conversations of agents, training and evaluation, with tools, calls and rewards."""
    from areal_lora.data.formatting import load_tokenizer
    from areal_lora.rollout.conversations import read_conversations

    folder = find_run(run)
    found = deque((c for c in read_conversations(folder) if uid is None or uid in c.uid), maxlen=count)
    if not found:
        what = "no conversation of an agent" + (f" whose problem's id has {uid!r}" if uid else "")
        raise ConfigError(str(folder.conversations), what, "workflow.kind: agent writes them, as its runs end")
    tokenizer = load_tokenizer(recorded_config(folder).model.folder) if tokens else None
    print("\n\n".join("\n".join(_lines(each, tokenizer)) for each in found))


def _lines(conversation: ConversationRecord, tokenizer: TextTokenizer | None) -> list[str]:
    kind = "evaluation, " if conversation.evaluation else ""
    reward = "no reward" if conversation.reward is None else f"reward {conversation.reward:g}"
    lines = [f"== {conversation.uid}, sample {conversation.sample} ({kind}{conversation.adapter}): {reward}"]
    lines += [f"   {conversation.detail}"] if conversation.detail else []
    for number, request in enumerate(conversation.requests, 1):
        names = ", ".join(str(tool["function"]["name"]) for tool in request.tools)
        after = f", continues {request.known} messages" if request.known else ""
        lines.append(f"-- request {number}{after}{f', tools: {names}' if names else ''}")
        lines += [f"prompt: {request.prompt}"] if request.prompt is not None else []
        lines += [line for turn in request.turns for line in _turn(turn)]
        for answer in request.answers:
            place = f"tokens {answer.begin} to {answer.end} of trajectory {answer.conversation}"
            lines += [*_turn(answer.turn), f"   ({answer.finish_reason}; {place})"]
    for i, trajectory in enumerate(conversation.tokens if tokenizer is not None else ()):
        assert tokenizer is not None
        lines.append(f"-- trajectory {i}: {_spelt(trajectory.token_ids, trajectory.versions, tokenizer)!r}")
    return lines


def _turn(turn: Turn) -> list[str]:
    lines = [f"{turn.role}: {turn.content}"] if turn.content or not turn.calls else []
    return lines + [f"{turn.role} calls {call.name}({call.arguments})" for call in turn.calls]


def _spelt(token_ids: list[int], versions: list[int], tokenizer: TextTokenizer) -> str:
    """The text, with what a version sampled in brackets."""
    text, start = "", 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or versions[end] != versions[start]:
            piece = tokenizer.decode(token_ids[start:end], skip_special_tokens=False)
            text += piece if versions[start] < 0 else f"[v{versions[start]}|{piece}]"
            start = end
    return text
