"""A tool-calling agent with the OpenAI Agents SDK (``pip install openai-agents``); see calculator.yaml."""

import re

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from areal_lora.rollout.agents import AgentTask
from areal_lora.tasks.rewards import extract_answer

set_tracing_disabled(True)  # traces would be sent to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Calculate with two whole numbers.

    Args:
        expression: For example 3*4.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if found is None:
        return "error: write two whole numbers with +, - or * between them"
    a, operation, b = int(found[1]), found[2], int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[operation])


async def agent(task: AgentTask) -> float:
    problem = task.sample.prompt.removeprefix("Q: ").removesuffix("\nA:")
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        model = OpenAIResponsesModel(task.model, client)
        assistant = Agent(name="Calculator", instructions="Calculate.", model=model, tools=[calculator])
        result = await Runner.run(assistant, problem)
    return float(extract_answer(str(result.final_output)) == extract_answer(task.sample.answer))
