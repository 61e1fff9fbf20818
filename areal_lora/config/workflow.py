"""The section ``workflow`` of an adapter: what one episode is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_lora.config.section import Arguments, NonNegInt, PositiveInt, Section


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
