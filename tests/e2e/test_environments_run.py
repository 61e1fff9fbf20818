"""Agents and environments of others in one run of five adapters: a taskset of verifiers, an MCP server, a gym-style
class, an OpenEnv server, and the OpenAI Agents SDK with a tool. Real packages, Megatron, vLLM and a vLLM tool parser.

Verifiers and OpenEnv have the interpreter of a virtual environment of their own. The tiny model knows one format only,
``3*4=12 12-5=7 #### 7``. Its answers stop at ``=``, which the parser of ``tests/support/agents`` reads as a call of the
calculator; the result comes back as a tool's message.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout.conversations import ConversationRecord, read_conversations
from tests.support.cli.command import areal_lora
from tests.support.e2e.several_adapters import SHORT, Ended, entries, run
from tests.support.paths import EXAMPLES, ROOT
from tests.support.rollout import gym_classes
from tests.support.rollout.real_environments import AGENT, TASKSET, TOOLS, environments_python, openenv_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The SDK's agent is given the problem alone, environments the whole text.
TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% if 'Q: ' in message.content %}{{ message.content }}{% else %}Q: {{ message.content }}
A:{% endif %}{% elif message.role == 'assistant' %}{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.arguments.expression }}={% endfor %}
{%- else %}{{ eos_token }}{% endif %}
{%- elif message.role == 'tool' %}{{ message.content }}{% endif %}
{%- endfor -%}"""
ONE_RANK = ("trainer.world_size=1", "trainer.ep=1")
STEPS = 2
SDK_STEPS = 2
PARSER = f"{ROOT / 'tests' / 'support' / 'agents' / 'own_format.py'}:CalculationParser"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    root = tmp_path_factory.mktemp("environments")
    model = Path(shutil.copytree(EXAMPLES / "tiny_model", root / "tiny model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (root / "cups.py").write_text(TASKSET)
    (root / "tools.py").write_text(TOOLS)
    python = str(environments_python())
    workflows: dict[str, dict[str, Any]] = {
        "attention": {"kind": "verifiers", "env": "cups", "args": {"agent": AGENT}, "python": python},
        "experts": {"kind": "mcp", "env": ["python tools.py"], "tool_parser": PARSER},
        "shared": {"kind": "gym", "env": f"{gym_classes.__file__}:Problem"},
    }
    changes = {name: {"workflow": workflow, "steps": STEPS} for name, workflow in workflows.items()}
    chosen = entries(*workflows, **changes)
    chosen.append(chosen[-1] | {"name": "served"})
    for entry in chosen:
        entry["sampling"] |= {"n_samples": 2, "timeout_s": 300}
    next(entry for entry in chosen if entry["name"] == "experts")["sampling"]["stop"] = ["="]
    sdk = {
        "name": "sdk",
        "workflow": {
            "kind": "agent",
            "path": f"{EXAMPLES.parent / 'workflows' / 'calculator.py'}:agent",
            "tool_parser": PARSER,
        },
        "task": {"kind": "word_problems", "n_eval": 6},
        "sampling": {"prompts_per_step": 4, "n_samples": 4, "max_new_tokens": 32, "stop": ["="]},
        "evals": [{"name": "as-agent", "n": 6}],
        "steps": SDK_STEPS,
    }
    with openenv_server(root) as url:
        chosen[-1]["workflow"] = {"kind": "openenv", "env": f"{url}/problem", "python": python}
        chosen += entries("attention", attention=sdk)
        ended = run(root, "environments", chosen, model=model, cwd=root, overrides=(*SHORT, *ONE_RANK))
    assert ended.code == 0, ended.output
    return ended


def conversations(ended: Ended, *adapters: str) -> list[ConversationRecord]:
    """Those that were trained on."""
    return [c for c in read_conversations(ended.folder) if c.adapter in adapters and not c.evaluation and not c.detail]


def test_environments_of_four_kinds_are_trained_on_together(ended: Ended) -> None:
    names = ("attention", "experts", "shared", "served")
    found = conversations(ended, *names)
    for name in names:
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
    if conversation.adapter in ("shared", "served"):
        (trajectory,) = conversation.tokens
        assert len(answers) == 2, "two steps of one episode"
    if conversation.adapter == "attention":
        (answer,) = answers
        assert conversation.reward == answer.turn.content.count("=")


def test_the_sdk_calls_tools_and_two_steps_are_trained(ended: Ended) -> None:
    """A conversation is the template's text with tools and calls; its trained tokens are the sampled ones."""
    trained = [c for c in read_conversations(ended.folder) if c.adapter == "sdk" and not c.evaluation]
    assert len(trained) >= SDK_STEPS * 4 * 4
    tokenizer = AutoTokenizer.from_pretrained(ended.folder.path.parent / "tiny model")
    several = [c for c in conversations(ended, "sdk") if len(c.requests) > 1]
    assert len(several) > 16
    for conversation in several:
        check_sdk(conversation, tokenizer)
    metrics = read_metrics(ended.folder)
    assert [step.step for step in metrics.steps if step.adapter == "sdk"] == list(range(SDK_STEPS))
    evals = [e for e in metrics.evals if e.adapter == "sdk"]
    assert [(e.name, e.version, e.n, e.unscored) for e in evals] == [("as-agent", v, 6, 0) for v in (0, SDK_STEPS)]
    assert sum(c.evaluation and c.adapter == "sdk" for c in read_conversations(ended.folder)) == 2 * 6
    shown = areal_lora("conversations", ended.folder.path, "--tokens", "--last", "500").stdout
    shown = "".join(each for each in shown.split("\n\n== ") if "(evaluation, sdk)" in each.partition("\n")[0])
    assert "calculator({" in shown
    assert "-- trajectory 0: 'Tools: calculatorQ: " in shown
    # vLLM's own server, with the same parser beside it.
    alone = areal_lora(
        "eval", ended.folder.path, "--version", "v2", "--adapter", "sdk", "--json", cwd=ROOT, timeout_s=280.0
    )
    assert alone.returncode == 0, alone.stderr
    again = msgspec.json.decode(alone.stdout, type=EvalRecord)
    assert (again.n, again.unscored, again.reward_mean) == (6, 0, pytest.approx(evals[1].reward_mean))


def check_sdk(conversation: ConversationRecord, tokenizer: AutoTokenizer) -> None:
    turns, tools = [], []
    for request in conversation.requests:
        turns, tools = [*turns[: request.known], *request.turns], tools or request.tools
        (answer,) = request.answers
        whole = conversation.tokens[answer.conversation].token_ids
        prompt = tokenizer.apply_chat_template(
            [turn.for_template() for turn in turns], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert whole[: answer.begin] == prompt
        assert all(v >= 0 for v in conversation.tokens[answer.conversation].versions[answer.begin : answer.end])
        turns.append(answer.turn)
    assert len(conversation.tokens) == 1
    assert sum(v >= 0 for v in conversation.tokens[0].versions) == sum(
        a.end - a.begin for r in conversation.requests for a in r.answers
    )
