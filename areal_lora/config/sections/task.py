"""The sections ``task``, ``workflow`` and ``evals`` of an adapter: problems and their prompts, what one episode is, and
the sets of held-out problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_lora.config.sections.section import NAME, Arguments, NonNegFloat, NonNegInt, PositiveInt, Scalar, Section


class PromptFormat(Section):
    kind: Literal["template", "chat"] = Field("template", description="`chat`: by the tokenizer's chat template.")
    template: str = Field(
        "{prompt}",
        description="Text of the prompt or of the user message; `{name}` is replaced by that column, `{prompt}` by "
        "`columns.prompt`. Unused with `columns.messages`.",
    )
    system_prompt: str | None = Field(
        None, description="System message put first, unless the row's messages start with one (`chat`)."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as `enable_thinking: false` (`chat`)."
    )
    prefill: str = Field("", description="Text with which each answer starts; it is given, not sampled (`chat`).")

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    @model_validator(mode="after")
    def _only_of_a_chat(self) -> Self:
        for key in ("system_prompt", "chat_template_kwargs", "prefill"):
            if getattr(self, key) and not self.is_chat:
                raise ValueError(f"kind template has no {key}: set kind=chat, or leave it out")
        return self


class Columns(Section):
    prompt: str = Field("prompt", description="Column with the text of the problem.")
    messages: str | None = Field(
        None, description="Column with a list of chat messages (`role`, `content`); replaces `prompt`."
    )
    answer: str | None = Field(
        "answer",
        description="Column with the gold answer, of any type, or a field in it: `reward_model.ground_truth`; null if "
        "the reward needs none.",
    )
    id: str | None = Field(None, description="Column that identifies a row; its number if unset.")


class WordProblemsTask(Section):
    kind: Literal["word_problems"] = "word_problems"
    level: Literal["two_step", "three_step"] = Field(
        "two_step", description="`three_step`: harder, with numbers of two digits; for the model `tiny_pupil`."
    )
    n_train: PositiveInt = Field(4096, description="Size of the generated training split.")
    n_eval: PositiveInt = Field(256, description="Size of the held-out split (disjoint from training).")
    seed: NonNegInt = Field(0, description="Chooses the problems.")
    format: PromptFormat = PromptFormat()


GSM8K: dict[str, Any] = {
    "train": "openai/gsm8k",
    "eval": "openai/gsm8k",
    "subset": "main",
    "n_eval": 1319,
    "columns": {"prompt": "question", "answer": "answer"},
    "format": {"template": "Question: {question}\nAnswer:"},
}
"""What ``kind: gsm8k`` sets; its answers end with ``#### n``."""


class DatasetTask(Section):
    kind: Literal["dataset", "gsm8k"] = Field(
        "dataset", description="`gsm8k`: rows with `question` and `answer`, whose answers end with `#### n`."
    )
    train: str = Field(
        description="JSONL, JSON, CSV or parquet file, a folder of such files, or a hub data set name `org/name`."
    )
    eval: str | None = Field(
        None, description="Held-out rows, as `train`; if unset, `n_eval` rows of `train` are held out."
    )
    columns: Columns = Columns()
    format: PromptFormat = PromptFormat()
    subset: str | None = Field(None, description="Configuration of a hub data set, such as `main`.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub data set.")
    train_split: str = Field("train", description="Split of a hub data set or folder to train on.")
    eval_split: str = Field("test", description="Split of a hub data set or folder that is held out.")
    n_train: PositiveInt | None = Field(None, description="Use only so many training rows, the first ones.")
    n_eval: PositiveInt | None = Field(None, description="Use only so many held-out rows, the first ones.")
    where: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict, description="Keep rows with these values: `level: [1, 2]` keeps those of either level."
    )
    keep: str | None = Field(
        None, description="`package.module:name` or `file.py:name` of `keep(row) -> bool`; it gets each row as a dict."
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("kind") == "gsm8k":
            return {**GSM8K, **data}
        return data


TaskConfig = Annotated[WordProblemsTask | DatasetTask, Field(discriminator="kind")]


class SingleTurnWorkflowConfig(Section):
    kind: Literal["single_turn"] = "single_turn"


class MultiTurnWorkflowConfig(Section):
    kind: Literal["multi_turn"] = "multi_turn"
    environment: str = Field(description="`package.module:name` or `file.py:name` of an Environment class or factory.")
    arguments: Arguments = Field(default_factory=dict, description="Keyword arguments of the environment.")
    max_turns: PositiveInt = Field(8, description="Largest number of model turns; a longer episode is cut there.")
    stop: list[str] = Field(
        default_factory=list, description="Texts that end an answer, for example the end of a tool call."
    )


class CustomWorkflowConfig(Section):
    kind: Literal["custom"] = "custom"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of a factory: `factory(context, **arguments)`."
    )
    arguments: Arguments = Field(default_factory=dict, description="Keyword arguments of the factory.")


class AgentWorkflowConfig(Section):
    kind: Literal["agent"] = "agent"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of `agent(task) -> float | None`, async or not, "
        "which calls the OpenAI endpoint in `task` with the key in `task`."
    )
    tool_parser: str | None = Field(
        None,
        description="What finds tool calls in answers: the name of one of vLLM's tool parsers (`hermes`, "
        "`llama3_json`, ...), or `package.module:name` or `file.py:name` of a subclass of vLLM's `ToolParser`. "
        "If unset, requests with tools are refused.",
    )
    conversations_mib: NonNegInt = Field(
        64, description="Bound of the conversations kept in the run folder, MiB; the oldest are dropped. 0: none."
    )


class ClientWorkflowConfig(Section):
    """A client of the service drives the adapter: no task, no rollouts, no steps of its own."""

    kind: Literal["client"] = "client"


WorkflowConfig = Annotated[
    SingleTurnWorkflowConfig
    | MultiTurnWorkflowConfig
    | CustomWorkflowConfig
    | AgentWorkflowConfig
    | ClientWorkflowConfig,
    Field(discriminator="kind"),
]


DEFAULT_SET = "held-out"
"""Name of the set of an adapter that configures none."""


class EvalSetConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the set in records, plots and TensorBoard tags.")
    task: TaskConfig | None = Field(
        None, description="The set has the held-out split of this task; of the adapter's own task if unset."
    )
    workflow: Literal["trained", "single_turn"] = Field(
        "trained", description="`trained`: the adapter's workflow, an agent as an agent; `single_turn`: one answer."
    )
    n_samples: PositiveInt = Field(
        1, description="Answers per problem; with several there are pass@k and majority@k, and `temperature` is not 0."
    )
    temperature: NonNegFloat = Field(0.0, description="Divides the logits; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Sample from the likeliest tokens only.")
    max_new_tokens: PositiveInt | None = Field(
        None, description="Longest answer, in tokens; `sampling.max_new_tokens` if unset."
    )
    n: PositiveInt | None = Field(None, description="Use only so many problems, the first ones.")
    correct_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Smallest reward of a correct answer where neither reward nor workflow states what is correct, "
        "for example that of an agent which returns its own reward.",
    )

    @model_validator(mode="before")
    @classmethod
    def _trains_on_nothing(cls, data: Any) -> Any:
        """Only held-out rows of a set's data set are read, so ``train`` may be left out."""
        task = data.get("task") if isinstance(data, Mapping) else None
        return (
            {**data, "task": {"train": "", **task}}
            if isinstance(task, Mapping) and task.get("kind") == "dataset"
            else data
        )

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if isinstance(self.task, DatasetTask) and self.task.eval is None:
            raise ValueError("a set has held-out rows only: add task.eval")
        return self
