"""``areal-lora logs``, ``samples`` and ``conversations``: texts that the processes of a run have written."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from areal_lora.cli.find_run import Adapter, Run, find_run
from areal_lora.config.recorded import read_config_here
from areal_lora.data.prompts import TextTokenizer, load_tokenizer
from areal_lora.errors import ConfigError
from areal_lora.obs.console import number, percent
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report.inspector import RolloutFilter, RolloutHead, RolloutIndex
from areal_lora.processes.log import printable
from areal_lora.rollout.agent_api.replies import Turn
from areal_lora.rollout.conversations import ConversationRecord, read_conversations

POLL_S = 0.3


def logs(
    run: Run,
    role: Annotated[
        str | None,
        typer.Argument(metavar="[ROLE[-INDEX]]", help="trainer, controller, server, service, job, or one of them"),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="show new lines until Ctrl-C")] = False,
    count: Annotated[int, typer.Option("-n", "--lines", min=0, help="last lines of each log")] = 20,
) -> None:
    """Show the last lines of the logs; a prefix names the process where there are several."""
    folder = find_run(run).logs
    tails = [Tail(path) for path in chosen(folder, role)]
    if not tails and not follow:
        names = sorted(path.stem for path in folder.glob("*.log"))
        what = f"no log of {role!r}" if role else "no log yet"
        fix = f"name one of {', '.join(names)}" if names else "start the run"
        raise ConfigError(str(folder), what, fix)
    for tail in tails:
        tail.start(count)
    _show(tails)
    while follow:
        time.sleep(POLL_S)
        known = {tail.path for tail in tails}
        tails += [Tail(path) for path in chosen(folder, role) if path not in known]
        _show(tails)


def chosen(folder: Path, role: str | None) -> list[Path]:
    """Logs whose name is ``role`` or starts with ``role-``, by name; all without one."""
    paths = sorted(folder.glob("*.log"), key=lambda path: (len(path.stem), path.stem))
    return [path for path in paths if role is None or path.stem == role or path.stem.startswith(f"{role}-")]


@dataclass(slots=True)
class Tail:
    """A log that is read from ``at`` on."""

    path: Path
    at: int = 0

    def start(self, count: int) -> None:
        """Move to the beginning of the last ``count`` lines."""
        with self.path.open("rb") as file:
            last = deque(file, maxlen=count)
            self.at = file.tell() - sum(map(len, last))

    def read_new(self) -> Iterator[str]:
        """Lines since the last call. A file that was cut starts again."""
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self.at:
                self.at = 0
            file.seek(self.at)
            for line in file:
                self.at += len(line)
                yield line.decode("utf-8", "replace").rstrip("\r\n")


def _show(tails: list[Tail]) -> None:
    width = max((len(tail.path.stem) for tail in tails), default=0)
    for tail in tails:
        prefix = f"{tail.path.stem:<{width}} | " if len(tails) > 1 else ""
        for line in tail.read_new():
            print(printable(prefix + line))
    sys.stdout.flush()


def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(metavar="K", min=0, help="the step; the newest if unset")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    adapter: Adapter = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="at most so many answers")] = 4,
) -> None:
    """Show the answers that are kept of a step, its groups, drops and errors."""
    folder = find_run(run)
    index, wanted = RolloutIndex(folder), RolloutFilter(adapter=adapter or "", outcome="trained")
    newest = index.page(wanted, limit=1).rows
    if not newest:
        raise ConfigError(str(folder.rollouts), "there is no answer of a trained step", "wait for the end of a step")
    chosen = newest[0].step if step is None else step
    found = index.rollouts(msgspec.structs.replace(wanted, step=chosen))
    if not found:
        kept = "{} to {}".format(*index.overview().steps)
        raise ConfigError(f"--step {chosen}", "no answer of it is kept", f"choose among steps {kept}")
    steps = [
        record
        for record in iter_metrics(folder)
        if isinstance(record, StepRecord) and record.step == chosen and adapter in (None, record.adapter)
    ]
    answers = sorted(found, key=lambda head: head.reward) if worst else found
    figures = map(_step, sorted(steps, key=lambda record: record.adapter))
    print(printable("\n\n".join([*figures, *(_answer(answer) for answer in answers[:count])])))


def _step(record: StepRecord) -> str:
    lines = [f"step {record.step} of {record.adapter}: reward {number(record.reward_mean)}"]
    if (equal := record.metrics.get("train/groups_equal")) is not None:
        lines[0] += f", {percent(equal)} of groups equal"
    for name, counts in (("dropped", record.dropped), ("retried", record.retried)):
        lines += [f"{name}: " + ", ".join(f"{key} {n}" for key, n in counts.items())] if counts else []
    return "\n".join([*lines, f"faults: {record.faults_text}"] if record.faults else lines)


def _answer(head: RolloutHead) -> str:
    versions = ", ".join(f"v{version}" for version in sorted({head.oldest, head.newest}))
    gold = f", gold {head.gold}" if head.gold else ""
    title = f"== {head.adapter}, step {head.step}, {versions}: reward {head.reward:g}{gold}"
    return f"{title}\n-- prompt\n{head.prompt}\n-- answer\n{head.answer}"


def conversations(
    run: Run,
    uid: Annotated[str | None, typer.Option(metavar="TEXT", help="only of problems whose id has this text")] = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="the last ones")] = 1,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="the trajectories' text too, as [v3|sampled by version 3]")
    ] = False,
) -> None:
    """Show the last conversations of agents, training and evaluation, with tools, calls and rewards."""
    folder = find_run(run)
    found = deque((c for c in read_conversations(folder) if uid is None or uid in c.uid), maxlen=count)
    if not found:
        what = "no conversation of an agent" + (f" whose problem's id has {uid!r}" if uid else "")
        raise ConfigError(str(folder.conversations), what, "workflow.kind: agent writes them, as its runs end")
    tokenizer = load_tokenizer(read_config_here(folder).model.folder) if tokens else None
    print(printable("\n\n".join("\n".join(_lines(each, tokenizer)) for each in found)))


def _lines(conversation: ConversationRecord, tokenizer: TextTokenizer | None) -> list[str]:
    kind = "evaluation, " if conversation.evaluation else ""
    reward = "no reward" if conversation.reward is None else f"reward {conversation.reward:g}"
    lines = [f"== {conversation.uid}, sample {conversation.sample} ({kind}{conversation.adapter}): {reward}"]
    lines += [f"   {conversation.detail}"] if conversation.detail else []
    for i, request in enumerate(conversation.requests, 1):
        names = ", ".join(str(tool["function"]["name"]) for tool in request.tools)
        after = f", continues {request.known} messages" if request.known else ""
        lines.append(f"-- request {i}{after}{f', tools: {names}' if names else ''}")
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
