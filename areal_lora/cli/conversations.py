"""``areal-lora conversations RUN``: what the agents of a run asked, and what the model answered."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.runs import RUN_HELP, find_run, recorded_config
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.data.tokenizer import TextTokenizer
    from areal_lora.rollout.agent_api.turns import Turn
    from areal_lora.rollout.conversations import Conversation


def conversations(
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    uid: Annotated[str | None, typer.Option(metavar="TEXT", help="only of problems whose id has this text")] = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="the last ones")] = 1,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="the trajectories' text too, as [v3|sampled by version 3]")
    ] = False,
) -> None:
    """Show the last conversations of agents, training and evaluation, with tools, calls and rewards."""
    from areal_lora.data.tokenizer import load_tokenizer
    from areal_lora.rollout.conversations import read_conversations

    folder = find_run(run)
    found = deque((c for c in read_conversations(folder) if uid is None or uid in c.uid), maxlen=count)
    if not found:
        what = "no conversation of an agent" + (f" whose problem's id has {uid!r}" if uid else "")
        raise ConfigError(str(folder.conversations), what, "workflow.kind: agent writes them, as its runs end")
    tokenizer = load_tokenizer(recorded_config(folder).model.folder) if tokens else None
    print("\n\n".join("\n".join(_lines(each, tokenizer)) for each in found))


def _lines(conversation: Conversation, tokenizer: TextTokenizer | None) -> list[str]:
    kind = "evaluation, " if conversation.evaluation else ""
    reward = "no reward" if conversation.reward is None else f"reward {conversation.reward:g}"
    lines = [f"== {conversation.uid}, sample {conversation.sample} ({kind}{conversation.adapter}): {reward}"]
    lines += [f"   {conversation.detail}"] if conversation.detail else []
    for number, asked in enumerate(conversation.requests, 1):
        names = ", ".join(str(tool["function"]["name"]) for tool in asked.tools)
        after = f", continues {asked.known} messages" if asked.known else ""
        lines.append(f"-- request {number}{after}{f', tools: {names}' if names else ''}")
        lines += [f"prompt: {asked.prompt}"] if asked.prompt is not None else []
        lines += [line for turn in asked.turns for line in _turn(turn)]
        for answer in asked.answers:
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
    text, begin = "", 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or versions[end] != versions[begin]:
            piece = tokenizer.decode(token_ids[begin:end], skip_special_tokens=False)
            text += piece if versions[begin] < 0 else f"[v{versions[begin]}|{piece}]"
            begin = end
    return text
