"""The section ``adapters[].task``: where problems come from, and how a row becomes a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_lora.config.section import NonNegInt, PositiveInt, Scalar, Section


class TemplateFormat(Section):
    kind: Literal["template"] = "template"
    template: str = Field(
        "{prompt}",
        description="Text of the prompt; `{name}` is replaced by that column, `{prompt}` by `columns.prompt`.",
    )


class ChatFormat(Section):
    kind: Literal["chat"] = "chat"
    system_prompt: str | None = Field(
        None, description="System message put first, unless the row's messages begin with one."
    )
    template: str = Field(
        "{prompt}", description="Text of the user message, as in `kind: template`; unused with messages."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the tokenizer's chat template, such as `enable_thinking: false`.",
    )
    prefill: str = Field("", description="Text with which each answer begins; it is given, not sampled.")


PromptFormat = Annotated[TemplateFormat | ChatFormat, Field(discriminator="kind")]


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
    format: PromptFormat = TemplateFormat()


class Gsm8kTask(Section):
    kind: Literal["gsm8k"] = "gsm8k"
    train: str = Field("openai/gsm8k", description="File of question/answer rows, or a hub data set name.")
    eval: str = Field("openai/gsm8k", description="Held-out file, or a hub data set name (its test split).")
    n_eval: PositiveInt = Field(1319, description="Held-out problems of one evaluation.")
    prompt_template: str = Field(
        "Question: {question}\nAnswer:", description="`{question}` is replaced; end answers with `#### n`."
    )


class DatasetTask(Section):
    kind: Literal["dataset"] = "dataset"
    train: str = Field(
        description="JSONL, JSON, CSV or parquet file, a folder of such files, or a hub data set name `org/name`."
    )
    eval: str | None = Field(
        None, description="Held-out rows, as `train`; if unset, `n_eval` rows of `train` are held out."
    )
    columns: Columns = Columns()
    format: PromptFormat = TemplateFormat()
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


TaskConfig = Annotated[WordProblemsTask | Gsm8kTask | DatasetTask, Field(discriminator="kind")]


class HeldOutTask(DatasetTask):
    """The data set of an evaluation: only its held-out rows are read."""

    train: str = Field("", description="Not read in an evaluation set.")
    eval: str = Field(description="Held-out rows: a file, folder or hub data set name.")


EvalTaskConfig = Annotated[WordProblemsTask | Gsm8kTask | HeldOutTask, Field(discriminator="kind")]
