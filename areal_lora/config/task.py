"""The section ``adapters[].task``: where problems come from, and how a row becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_lora.config.section import NonNegInt, PositiveInt, Scalar, Section


class PromptFormat(Section):
    kind: Literal["template", "chat"] = Field("template", description="`chat`: by the tokenizer's chat template.")
    template: str = Field(
        "{prompt}",
        description="Text of the prompt or of the user message; `{name}` is replaced by that column, `{prompt}` by "
        "`columns.prompt`. Unused with `columns.messages`.",
    )
    system_prompt: str | None = Field(
        None, description="System message put first, unless the row's messages begin with one (`chat`)."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as `enable_thinking: false` (`chat`)."
    )
    prefill: str = Field("", description="Text with which each answer begins; it is given, not sampled (`chat`).")

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
