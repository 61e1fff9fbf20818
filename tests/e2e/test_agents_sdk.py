"""The OpenAI Agents SDK with a tool, unmodified, in a run of two steps: real Megatron, real vLLM, a vLLM tool parser.

The tiny model knows one format only, ``3*4=12 12-5=7 #### 7``. Its answers stop at ``=``, which the parser of
``tests/support/agents`` reads as a call of the calculator; the result comes back as a tool's message.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from transformers import AutoTokenizer

from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.rollout.conversations import ConversationRecord, read_conversations
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import areal_lora
from tests.support.launcher.command import forked_run
from tests.support.paths import EXAMPLES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEMPLATE = """\
{%- if tools -%}Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}Q: {{ message.content }}
A:{% elif message.role == 'assistant' %}{{ message.content }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.arguments.expression }}={% endfor %}
{%- else %}{{ eos_token }}{% endif %}
{%- elif message.role == 'tool' %}{{ message.content }}{% endif %}
{%- endfor -%}"""
OVERLAY = """
model: {{path: {model}}}
adapters:
  - workflow:
      kind: agent
      path: {examples}/calculator.py:agent
      tool_parser: {support}/own_format.py:CalculationParser
    sampling: {{prompts_per_step: 4, n_samples: 4, stop: ["="]}}
    evals:
      - {{name: as-agent, n: 6}}
"""


def test_the_sdk_calls_tools_and_two_steps_are_trained(tmp_path: Path) -> None:
    model = Path(shutil.copytree(EXAMPLES / "tiny_model", tmp_path / "tiny model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    overlay = tmp_path / "agent.yaml"
    overlay.write_text(
        OVERLAY.format(
            model=f'"{model}"', support=ROOT / "tests" / "support" / "agents", examples=EXAMPLES.parent / "workflows"
        )
    )
    command = forked_run(tmp_path, "--config", str(overlay), f"run.root={tmp_path / 'runs'}", "run.steps=2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = RunFolder(tmp_path / "runs" / "embedded")
    found = list(read_conversations(folder))
    trained = [c for c in found if not c.evaluation]
    assert len(trained) >= 2 * 4 * 4
    # A conversation is the template's text with tools and calls; its trained tokens are the sampled ones.
    tokenizer = AutoTokenizer.from_pretrained(model)
    several = [c for c in trained if len(c.requests) > 1 and not c.detail]
    assert len(several) > 16
    for conversation in several:
        check(conversation, tokenizer)
    run = read_metrics(folder)
    assert len(run.steps) == 2
    assert [(e.name, e.version, e.n, e.unscored) for e in run.evals] == [("as-agent", v, 6, 0) for v in (0, 2)]
    assert sum(c.evaluation for c in found) == 2 * 6
    shown = areal_lora("conversations", folder, "--tokens")
    assert "calculator({" in shown.stdout
    assert "-- trajectory 0: 'Tools: calculatorQ: " in shown.stdout
    # vLLM's own server, with the same parser beside it.
    alone = areal_lora("eval", folder, "--version", "v2", "--json", timeout_s=280.0)
    assert alone.returncode == 0, alone.stderr
    again = msgspec.json.decode(alone.stdout, type=EvalRecord)
    assert (again.n, again.unscored, again.reward_mean) == (6, 0, pytest.approx(run.evals[1].reward_mean))


def check(conversation: ConversationRecord, tokenizer: AutoTokenizer) -> None:
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
