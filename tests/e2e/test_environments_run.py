"""Environments of others in one run of three adapters: a taskset of verifiers, an MCP server, a gym-style class.

Real packages, in workers; those of verifiers have the interpreter of a virtual environment of their own. Real Megatron
and vLLM.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_lora.rollout.conversations import ConversationRecord, read_conversations
from tests.support.e2e.several_adapters import entries, run
from tests.support.paths import EXAMPLES, ROOT
from tests.support.rollout import gym_classes
from tests.support.rollout.real_environments import AGENT, TASKSET, TOOLS, verifiers_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ message.content }}{% elif message.role == 'assistant' %}{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.arguments.expression }}={% endfor %}
{%- else %}{{ eos_token }}{% endif %}
{%- elif message.role == 'tool' %}{{ message.content }}{% endif %}
{%- endfor -%}"""
STEPS = 2


def test_environments_of_three_kinds_are_trained_on_together(tmp_path: Path) -> None:
    model = Path(shutil.copytree(EXAMPLES / "tiny_model", tmp_path / "tiny model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "cups.py").write_text(TASKSET)
    (tmp_path / "tools.py").write_text(TOOLS)
    parser = f"{ROOT / 'tests' / 'support' / 'agents' / 'own_format.py'}:CalculationParser"
    python = str(verifiers_python())
    workflows: dict[str, dict[str, Any]] = {
        "attention": {"kind": "verifiers", "env": "cups", "args": {"agent": AGENT}, "python": python, "workers": 2},
        "experts": {"kind": "mcp", "env": ["python tools.py"], "tool_parser": parser},
        "shared": {"kind": "gym", "env": f"{gym_classes.__file__}:Problem"},
    }
    changes = {name: {"workflow": workflow, "steps": STEPS} for name, workflow in workflows.items()}
    chosen = entries(*workflows, **changes)
    for entry in chosen:
        entry["sampling"] |= {"n_samples": 2, "timeout_s": 300}
    next(entry for entry in chosen if entry["name"] == "experts")["sampling"]["stop"] = ["="]
    ended = run(tmp_path, "environments", chosen, model=model, cwd=tmp_path)
    assert ended.code == 0, ended.output
    found = [c for c in read_conversations(ended.folder) if not c.evaluation and not c.detail]
    for name in workflows:
        mine = [record for record in ended.steps if record["adapter"] == name]
        assert [record["step"] for record in mine] == list(range(STEPS))
        assert len([c for c in found if c.adapter == name]) >= STEPS * 2 * 2
        if name == "attention":
            assert all(
                record["metrics"]["reward/equations"] == record["metrics"]["train/reward_mean"] for record in mine
            )
    called = 0
    for conversation in found:
        check(conversation)
        called += any(turn.role == "tool" for request in conversation.requests for turn in request.turns)
    assert called > 2, "tools were called"


def check(conversation: ConversationRecord) -> None:
    """Each answer's tokens are those that a server sampled, with their version; prompts and replies have none."""
    for trajectory in conversation.tokens:
        assert len(trajectory.token_ids) == len(trajectory.versions)
        assert set(trajectory.versions) <= {-1, *range(STEPS)}
    sampled = sum(v >= 0 for each in conversation.tokens for v in each.versions)
    answers = [answer for request in conversation.requests for answer in request.answers]
    assert sampled == sum(answer.end - answer.begin for answer in answers) > 0
    if conversation.adapter == "shared":
        (trajectory,) = conversation.tokens
        assert len(answers) == 2, "two steps of one episode"
    if conversation.adapter == "attention":
        (answer,) = answers
        assert conversation.reward == answer.turn.content.count("=")
