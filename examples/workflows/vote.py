"""An agent that asks three times and is judged by the answer that most of them give."""

from collections import Counter

import aiohttp

from areal_lora.rollout.agents import AgentTask
from areal_lora.tasks.rewards import extract_answer


async def agent(task: AgentTask) -> float:
    headers = {"Authorization": f"Bearer {task.api_key}"}
    answers = []
    async with aiohttp.ClientSession(task.base_url + "/", headers=headers, raise_for_status=True) as session:
        for _ in range(3):
            body = {"model": task.model, "prompt": task.sample.prompt}
            async with session.post("completions", json=body) as response:
                reply = await response.json()
            answers.append(extract_answer(reply["choices"][0]["text"]))
    most_common, _ = Counter(answers).most_common(1)[0]
    return float(most_common is not None and most_common == extract_answer(task.sample.answer))
