"""``areal-lora init FILE``: a commented configuration for a model and a data set, from options or five questions."""

import json
import os
import shutil
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from areal_lora.errors import ConfigError
from areal_lora.families.shape import read_shape
from areal_lora.tasks.datasets import RowSource, read_rows
from areal_lora.tasks.stored_samples import value_of

NUMERIC, MATH, FUNCTION = "numeric_match", "math_verify", "file.py:name or package.module:name of a function"


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file to write; it must not exist")],
    model: Annotated[str, typer.Option(help="folder or hub name of the base model")] = "",
    data: Annotated[str, typer.Option(help="JSONL, JSON, CSV or parquet file, a folder of them, or a hub name")] = "",
    prompt: Annotated[str, typer.Option(metavar="COLUMN", help="column with the problem, or chat messages")] = "",
    answer: Annotated[str, typer.Option(metavar="COLUMN", help="column with the gold answer; - for none")] = "",
    reward: Annotated[str, typer.Option(help=f"{NUMERIC}, {MATH}, or {FUNCTION}")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="write prompts with the tokenizer's chat template")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda where nvidia-smi is found if not given")] = "",
) -> None:
    """Write a configuration for this machine, with a comment on each choice. Prompts for what no option gives."""
    if file.exists():
        raise ConfigError(str(file), "it exists", "name a new file")
    device = device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", f"{device!r} is no device", "cpu or cuda")
    on_cpu = device == "cpu"
    model = _absolute(_asked("--model", model, "Base model (folder or hub name)"))
    data = _absolute(_asked("--data", data, "Data (JSONL, JSON, CSV or parquet file, or hub name)"))
    prompt = _asked("--prompt", prompt, "Column with the problem", "prompt")
    answer = _asked("--answer", answer, "Column with the gold answer (- for none)", "answer")
    messages = _has_messages(data, prompt)
    reward = _asked("--reward", reward, f"Reward ({NUMERIC}, {MATH}, or {FUNCTION})", NUMERIC)
    longest = min(1024 if on_cpu else 4096, _positions(model))
    # Every value that comes from outside is quoted.
    text = TEMPLATE.format(
        name=json.dumps("".join(c if c.isalnum() or c in "._-" else "-" for c in file.stem).strip("._-") or "run"),
        model=json.dumps(model),
        data=json.dumps(data),
        prompt=f"{'messages' if messages else 'prompt'}: {json.dumps(prompt)}",
        answer="null" if answer == "-" else json.dumps(answer),
        reward=_reward(reward),
        format="kind: chat # by the tokenizer's chat template" if chat or messages else "kind: template\n" + TEXT,
        max_model_len=longest,
        max_new_tokens=longest // 4,
        prompts=16 if on_cpu else 64,
        microbatch=4096 if on_cpu else 16384,
        dtype="float32" if on_cpu else "bfloat16",
        device=device,
        devices_per_node="" if on_cpu else DEVICES,
        cache=CACHE if on_cpu else "",
    )
    file.write_text(text, encoding="utf-8")
    command, place = f"{quote(sys.executable)} -m areal_lora", quote(str(file.absolute()))
    print(f"{file} is written. What a start would do, and the start:")
    print(f"  {command} plan --config {place}\n  {command} train --config {place}")


def _asked(option: str, given: str, question: str, default: str | None = None) -> str:
    if given:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(option, "it is missing, and there is no terminal for a prompt", f"give {option} VALUE")
    answer: str = typer.prompt(question, default=default)
    return answer.strip()


def _absolute(text: str) -> str:
    path = Path(os.path.expanduser(text))
    return str(path.absolute()) if path.exists() else text


def _has_messages(data: str, column: str) -> bool:
    """Whether ``column`` of the first row has chat messages; only a file here is read."""
    rows = read_rows(RowSource(path=data, key="--data")) if Path(data).is_file() else iter(())
    with suppress(KeyError):  # a start names the columns
        return any(isinstance(value_of(row.values, column), list) for row in islice(rows, 1))
    return False


def _positions(model: str) -> int:
    """Longest sequence of a model in a folder; no limit for one whose files are not here."""
    if not Path(model).is_dir():
        return sys.maxsize
    try:
        return read_shape(Path(model)).max_positions
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"its config.json cannot be used: {error!r}"
        raise ConfigError(model, reason, "give a Hugging Face model folder") from None


def _reward(text: str) -> str:
    if text in (NUMERIC, MATH):
        return f"kind: {text}"
    place, _, name = text.rpartition(":")
    if not place:
        raise ConfigError("--reward", f"{text!r} is no reward", f"{NUMERIC}, {MATH}, or {FUNCTION}")
    place = _absolute(place) if place.endswith(".py") else place
    return f"kind: function\n      path: {json.dumps(f'{place}:{name}')} # see docs/en/tasks.md"


TEXT = '        template: "{prompt}" # put text around the problem here; {column} is any column'
DEVICES = "\n  devices_per_node: 2 # one trains, one samples"
CACHE = "\n  kv_cache_gib: 0.5 # of memory, for running sequences\n  engine_args: { enforce_eager: true }"
TEMPLATE = """\
# Written by areal-lora init. Every key: docs/en/configuration.md.
run:
  name: {name} # results are in runs/<name>
  steps: 100

model:
  path: {model}
  dtype: {dtype}

adapters:
  - name: policy
    rank: 16
    alpha: 32 # the product is scaled by alpha / rank
    target_modules: [all-linear]
    task:
      kind: dataset
      train: {data} # without `eval`, some of these rows are held out
      columns:
        {prompt}
        answer: {answer}
      format:
        {format}
    reward:
      {reward}
    algorithm:
      kind: grpo
    optimizer:
      lr: 1.0e-5 # small models stand ten times more
    sampling:
      prompts_per_step: {prompts}
      n_samples: 8 # answers per problem; their rewards are compared with each other
      max_new_tokens: {max_new_tokens} # longer answers are cut

trainer:
  world_size: 1 # processes; more with tp, pp, ep for larger models
  max_tokens_per_microbatch: {microbatch}

rollout:
  servers: 1
  max_lora_rank: 16
  max_model_len: {max_model_len} # tokens of problem and answer together{cache}

eval:
  every_steps: 10 # greedy answers to the held-out rows

cluster:
  kind: local
  device: {device}{devices_per_node}
"""
