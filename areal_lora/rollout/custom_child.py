"""Custom workflows, in worker processes: their context samples and scores through the controller.

    CustomWorkflows.play --Call: requests of client and scorer--> controller: WorkflowContext of the same settings
                         <-- CallAnswer ------------------------

Tokens and episodes are made here. The controller resolves the newest version, and keeps conversations at their servers.
"""

import base64
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import msgspec

from areal_lora.config.models import AdapterConfig, Config, SamplingConfig
from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.packed_groups import check_alignment, check_rewards
from areal_lora.data.prompts import Formatter, Prompt, TextTokenizer, load_tokenizer
from areal_lora.errors import AlignmentError
from areal_lora.network.http_server import ParsedText, ToolCallsBody
from areal_lora.rollout.completion_client import Arrived, CompletionRequest, FaultKind, GenerationFault
from areal_lora.rollout.environment_kinds import WorkerKind, called
from areal_lora.rollout.workflow import Episode, RolloutClient, Workflow, WorkflowContext, first_fault, given_score
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.types import AdapterRef, Generation, Outcome

T = TypeVar("T")


class ContextFields(msgspec.Struct, frozen=True, kw_only=True):
    """A `WorkflowContext` without client and scorer; ``model`` is the folder of its tokenizer."""

    model: str
    format: dict[str, Any]
    sampling: dict[str, Any]
    max_model_len: int
    streams: bool
    evaluating: bool = False

    @classmethod
    def of(cls, config: Config, adapter: AdapterConfig) -> Self:
        """Fields of the adapter's training."""
        return cls(
            model=config.model.folder,
            format=adapter.task.format.model_dump(mode="json"),
            sampling=adapter.sampling.model_dump(mode="json"),
            max_model_len=config.rollout.max_model_len,
            streams=config.behaviour.router_replay != "rollout",
        )


def fields_of(context: WorkflowContext, model: str) -> ContextFields:
    return ContextFields(
        model=model,
        format=context.formatter.how.model_dump(mode="json"),
        sampling=context.sampling.model_dump(mode="json"),
        max_model_len=context.max_model_len,
        streams=context.streams,
        evaluating=context.evaluating,
    )


def context_of(fields: ContextFields, client: RolloutClient, formatter: Formatter) -> WorkflowContext:
    """With a scorer that calls the controller, as code in a worker does."""
    # That of evaluations and ReMax's baseline is 0, which is no temperature of training.
    temperature = {"temperature": fields.sampling["temperature"]}
    return WorkflowContext(
        client=client,
        scorer=CallingScorer(),
        sampling=SamplingConfig.model_validate({**fields.sampling, "temperature": 1}).model_copy(update=temperature),
        formatter=formatter,
        max_model_len=fields.max_model_len,
        streams=fields.streams,
    )


class WorkflowRun(msgspec.Struct, frozen=True, kw_only=True):
    prompt: Prompt
    ref: AdapterRef
    seed: int


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a method of `CompletionClient`.

    ``conversation`` has the numbers of the conversation's group, if there is one, and of the conversation.
    """

    conversation: tuple[int, ...]
    ref: AdapterRef
    timeout_s: float


class SampleCall(ClientCall, frozen=True, kw_only=True, tag=True):
    request: CompletionRequest


class GivenAnswerCall(ClientCall, frozen=True, kw_only=True, tag=True):
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float


class ToolCallsCall(ClientCall, frozen=True, kw_only=True, tag=True):
    request: ToolCallsBody


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    items: list[ScoreItem]


Call = SampleCall | GivenAnswerCall | ToolCallsCall | ScoreCall


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``result`` is what the call returns, in msgpack; with a ``fault`` it has raised that."""

    result: bytes = b""
    fault: FaultKind | None = None
    detail: str = ""


def packed(message: Any) -> str:
    """In msgpack, as text for the JSON of the pipe."""
    return base64.b64encode(msgspec.msgpack.encode(message)).decode()


def unpacked(text: str, kind: Any) -> Any:
    """Raises msgspec.DecodeError for what is no ``kind``."""
    return msgspec.msgpack.decode(base64.b64decode(text), type=kind)


_call = ContextVar[Callable[[str], Awaitable[str]]]("call")
"""That of the sample whose code runs."""


async def _result(call: Call, kind: type[T]) -> T:
    answer = unpacked(await _call.get()(packed(call)), CallAnswer)
    if answer.fault is not None:
        raise GenerationFault(answer.fault, answer.detail)
    return msgspec.msgpack.decode(answer.result, type=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallingClient:
    """The controller's `CompletionClient`, by calls, which raise GenerationFault. Answers come whole."""

    pins: bool
    path: tuple[int, ...] = ()
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def conversation(self) -> Self:
        return replace(self, path=(*self.path, next(self.numbers)))

    def newest(self, ref: AdapterRef) -> AdapterRef:
        """``ref``, of which the controller uses the newest version as soon as it samples."""
        return ref

    async def sample(
        self, ref: AdapterRef, request: CompletionRequest, *, timeout_s: float, arrived: Arrived | None = None
    ) -> list[Generation]:
        answers = await _result(
            SampleCall(conversation=self.path, ref=ref, request=request, timeout_s=timeout_s), list[Generation]
        )
        if arrived is not None:
            for index, answer in enumerate(answers):
                arrived(index, answer)
        return answers

    async def score(
        self, ref: AdapterRef, prompt_ids: list[int], answer_ids: list[int], *, temperature: float, timeout_s: float
    ) -> Generation:
        call = GivenAnswerCall(
            conversation=self.path,
            ref=ref,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            temperature=temperature,
            timeout_s=timeout_s,
        )
        return await _result(call, Generation)

    async def tool_calls(self, ref: AdapterRef, request: ToolCallsBody, *, timeout_s: float) -> list[ParsedText]:
        call = ToolCallsCall(conversation=self.path, ref=ref, request=request, timeout_s=timeout_s)
        return await _result(call, list[ParsedText])


class CallingScorer:
    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return await _result(ScoreCall(items=list(items)), list[Score])


class _Tokenizer:
    """Loaded when it is first used: a workflow of single turns starts without transformers, which takes seconds."""

    def __init__(self, folder: str) -> None:
        self._load = functools.cache(functools.partial(load_tokenizer, folder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __len__(self) -> int:
        return len(self._load())

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return self._load()(text)


class _ChildFormatter(Formatter):
    """Without ends of turns: the controller adds them to the requests."""

    @property
    def ends(self) -> list[int]:
        return []


class CustomWorkflows(WorkerKind):
    """Those that ``factory`` makes, one for each context; the first at once, for the training's ``context``."""

    def __init__(self, factory: Callable[..., Workflow], arguments: Mapping[str, Any], context: dict[str, Any]) -> None:
        self._made = functools.partial(factory, **arguments)
        self._workflows = dict[bytes, Workflow]()
        self._workflow(context)

    def _workflow(self, context: dict[str, Any]) -> Workflow:
        key = msgspec.json.encode(context)
        if key not in self._workflows:
            self._workflows[key] = _checked(self._made, msgspec.convert(context, ContextFields))
        return self._workflows[key]

    async def play(self, task: Any) -> dict[str, Any]:
        """``task`` has the fields of a context, a packed `WorkflowRun`, and ``call``; returns an Episode or a fault."""
        _call.set(task.call)
        run: WorkflowRun = unpacked(task.run, WorkflowRun)
        try:
            episode = await self._workflow(task.context).run(run.prompt, run.ref, run.seed)
        except GenerationFault as fault:
            return {"error": fault.detail, "fault": fault.kind, "cause": fault.cause}
        except AlignmentError as error:
            return {"error": str(error), "untrainable": True}
        return {"episode": packed(episode)}


def _checked(made: Callable[[WorkflowContext], Workflow], fields: ContextFields) -> "CheckedWorkflow":
    tokenizer: TextTokenizer = _Tokenizer(fields.model)
    formatter = _ChildFormatter(tokenizer=tokenizer, how=PromptFormat.model_validate(fields.format))
    context = context_of(fields, CallingClient(pins=fields.evaluating), formatter)
    workflow = made(context)
    _ = workflow.run  # a workflow without it is found here, not at the first prompt
    return CheckedWorkflow(inner=workflow, context=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWorkflow:
    """A user's workflow, whose results obey contract C10."""

    inner: Workflow
    context: WorkflowContext

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Raises AlignmentError for an episode that cannot be trained on: code to correct, not a fault to retry."""
        episode = await called(self.inner.run, prompt, ref, seed)
        if not isinstance(episode, Episode):
            raise AlignmentError(f"{prompt.uid}: the workflow returned {type(episode).__name__}, not an Episode")
        # As the ledger will decode it, with float rewards. A wrong type may raise any exception.
        graded = list(episode.group.trajectories)
        for i, t in enumerate(graded):
            if t.outcome is Outcome.OK:
                score = given_score(t.reward)
                graded[i] = replace(
                    t,
                    reward=score.reward,
                    outcome=score.outcome,
                    detail=score.detail or t.detail,
                    cause=score.cause,
                    components={**t.components, **score.components},
                    correct=t.correct if score.correct is None else score.correct,
                )
        group = replace(episode.group, trajectories=tuple(graded))
        episode = Episode(group=group, texts=tuple(episode.texts), turns=tuple(episode.turns))
        episode = msgspec.msgpack.decode(msgspec.msgpack.encode(episode), type=Episode)
        if episode.group.uid != prompt.uid:
            raise AlignmentError(f"{prompt.uid}: the workflow returned an Episode of {episode.group.uid}")
        if not graded or len(episode.texts) != len(graded):
            raise AlignmentError(f"{prompt.uid}: {len(graded)} trajectories and {len(episode.texts)} texts")
        for trajectory in episode.group.trajectories:
            check_alignment(trajectory)
            if not trajectory.columns.n_sampled or trajectory.adapter.name != ref.name:
                raise AlignmentError(f"trajectory {trajectory.uid}: nothing in it was sampled by {ref.name}")
            if len(trajectory.columns) > self.context.max_model_len:
                raise AlignmentError(
                    f"trajectory {trajectory.uid}: {len(trajectory.columns)} tokens are more than "
                    f"rollout.max_model_len = {self.context.max_model_len}"
                )
        if first_fault(episode.group) is None:
            check_rewards([(0, trajectory) for trajectory in episode.group.trajectories])
        return episode
