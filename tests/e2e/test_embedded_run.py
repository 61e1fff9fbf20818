"""A short run of the shipped example through the launcher: real Megatron on two ranks, real vLLM, a real adapter.

The model is given by its hub name; its files are in a cache folder and no hub answers. What the run prints at its
end is run as printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.tasks.datasets import load_samples
from areal_lora.weight_sync.manifest import base_digest
from tests.support.docs import commands
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES, plain_run
from tests.support.launcher.hub_cache import FIRST, NAME, fill_cache, tiny_files
from tests.support.paths import EXAMPLES, ROOT, TINY_MODEL

STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def shell(command: str, timeout_s: float = 380) -> subprocess.CompletedProcess[str]:
    """A printed command as pasted, in a folder where nothing is."""
    words = ["bash", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, cwd="/", check=False)


@dataclass
class Run:
    folder: Path
    output: str
    code: int
    snapshot: Path
    left: list[str]
    """Commands that mention its folder and run after its end."""

    @property
    def config(self) -> Config:
        return Config.model_validate_json((self.folder / "config.json").read_text())

    def printed(self, label: str) -> str:
        """What follows ``label`` in the one line of the end, or of the details, that begins with it."""
        lines = [*self.output.splitlines(), *self.details]
        [line] = [line for line in lines if line.startswith(f"{label} ")]
        return line.removeprefix(label).strip()

    @cached_property
    def details(self) -> list[str]:
        """What the run prints of itself on request."""
        done = shell(f"{shlex.quote(sys.executable)} -m areal_lora status {shlex.quote(str(self.folder))} --details")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def adapter(self) -> Path:
        return self.folder / "adapters" / "gsm8k"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs with a space")
    snapshot = fill_cache(root / "hub cache", tiny_files())
    environment = {**os.environ, "HF_HUB_CACHE": str(root / "hub cache"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = plain_run(
        f"run.root={root}",
        "run.name=short",
        f"model.path={NAME}",
        f"run.steps={STEPS}",
        "eval.every_steps=3",
        "adapters.gsm8k.sampling.prompts_per_step=24",
        "adapters.gsm8k.task.n_eval=64",
        "run.page=true",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    folder, commands = root / "short", [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    left = [c for c in commands if str(folder) in c]
    return Run(folder=folder, output=done.stdout + done.stderr, code=done.returncode, snapshot=snapshot, left=left)


@dataclass
class Serving:
    """The printed ``serve``, whose start nothing else waits for."""

    process: subprocess.Popen[bytes]
    log: Path

    def url(self) -> str:
        return wait_until_it_says(r" answers at (\S+) ", self.process, self.log)


@pytest.fixture(scope="module", autouse=True)
def serving(run: Run) -> Iterator[Serving]:
    assert run.code == 0, run.output
    log = run.folder / "serve.log"
    with started(f"{run.printed('serve')} --port 0", log) as process:  # 8000 may be in use on this machine
        yield Serving(process, log)


def test_its_page_was_announced_and_ended_with_it(run: Run) -> None:
    [address] = re.findall(r"page: (http://127\.0\.0\.1:\d+/\S+/)\n", run.output)
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(address, timeout=60)


def test_it_ends_well_and_says_what_it_made(run: Run) -> None:
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["steps"] == STEPS
    assert summary["publishes"] == STEPS + 1 == summary["publishes_probed"]
    end = run.output.strip().splitlines()[-5:]
    assert [line.split()[0] for line in end] == ["result", "adapter", "report", "chat", "resume"]
    assert end[0].startswith(f"result   {STEPS} steps in ")
    last_lines = run.details[-len(summary) :]
    assert {line.split(": ", 1)[0]: json.loads(line.split(": ", 1)[1]) for line in last_lines} == summary
    assert Path(summary["report_path"]).read_text().count("<figcaption>") >= 5


def test_a_hub_name_is_what_the_run_starts_from(run: Run) -> None:
    model = run.config.model
    assert (model.path, model.commit, model.folder) == (NAME, FIRST, str(run.snapshot))
    assert run.summary["model"] == NAME
    exported = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (exported["base_model_name_or_path"], exported["revision"]) == (NAME, FIRST)
    [manifest] = sorted((run.folder / "checkpoints").rglob(f"v{STEPS:06d}/manifest.json"))
    assert base_digest(TINY_MODEL) in manifest.read_text()


def test_trainer_and_server_agree_after_every_publish(run: Run) -> None:
    publishes = read_metrics(run.folder).publishes
    assert [p.version for p in publishes] == list(range(STEPS + 1))
    for publish in publishes:
        assert publish.probe_mean_abs is not None
        assert publish.probe_mean_abs <= 1e-4, publish


def test_servers_confirm_some_of_the_batches_at_every_lag(run: Run) -> None:
    """A server that is slow to answer delays no step: that one has no audit."""
    steps = read_metrics(run.folder).steps
    audited = [s for s in steps if s.metrics.get("train/audited_tokens")]
    assert any(n for s in audited for age, n in s.staleness.items() if age > 0), "also where tokens are not fresh"
    assert all(s.metrics["train/audit_gap"] < 1e-4 for s in audited)  # type: ignore[operator]


def test_staleness_is_bounded_and_rollouts_overlap_training(run: Run) -> None:
    histogram = {int(k): v for k, v in run.summary["staleness_histogram"].items()}
    assert min(histogram) >= 0
    assert max(histogram) <= 2
    assert sum(v for age, v in histogram.items() if age > 0) > 0


def test_nothing_is_left_running(run: Run) -> None:
    assert run.left == []


def test_secret_is_private_and_not_logged(run: Run) -> None:
    secret = run.folder / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    text = secret.read_text().strip()
    assert all(text not in log.read_text(errors="replace") for log in (run.folder / "logs").iterdir())


def test_the_exported_adapter_is_the_trained_policy_in_stock_peft(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron with the exported adapter loaded back, against stock peft and transformers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    out = run.folder / "scores.json"
    words = [str(run.folder), str(run.adapter), str(out)]
    starter_of(ROLES["trainer.python"]).output("tests.support.e2e.megatron_scores", words, 400.0)
    scores = json.loads(out.read_text())
    base = AutoModelForCausalLM.from_pretrained(run.config.model.folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    worst, moved = list[float](), 0.0
    for ids, ours in zip(scores["token_ids"], scores["logprobs"], strict=True):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            theirs = _logprobs(model(tokens).logits[0], ids)
            with model.disable_adapter():
                moved = max(moved, float((_logprobs(model(tokens).logits[0], ids) - theirs).abs().max()))
        worst.append(float((theirs - torch.tensor(ours)[1:]).abs().max()))
    assert sorted(worst)[-2] <= 1e-4, "a tie between experts spoils one text of 16 at most"
    assert moved > 0.05, "the adapter changes nothing: the comparison proves nothing"


def _logprobs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@contextmanager
def started(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A printed command in a shell, from a folder where nothing is; ended with all its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(["bash", "-c", f"exec {command.strip()}"], cwd="/", stdout=output, stderr=output)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        _, alive = psutil.wait_procs(children, timeout=60)
        for survivor in alive:
            survivor.kill()
        process.wait(timeout=150)


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 300) -> bytes:
    deadline = time.monotonic() + timeout_s
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                content: bytes = answer.read()
                return content
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert time.monotonic() < deadline, f"{url} does not answer: {log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.2)


def wait_until_it_says(pattern: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 300) -> str:
    deadline = time.monotonic() + timeout_s
    while (found := re.search(pattern, log.read_text(errors="replace"), re.M)) is None:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    return found[1]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=280) as answer:
        content: dict[str, Any] = json.loads(answer.read())
        return content


def test_the_printed_serve_command_gives_the_same_greedy_answers_as_stock_peft(run: Run, serving: Serving) -> None:
    """Stock vLLM serves the exported version; of this package only the plugin for LoRA on CPU experts is active."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.config.model.folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = load_samples(run.config.adapters[0].task, "eval")[:32]
    prompts = [tokenizer.encode(s.prompt, add_special_tokens=False) for s in samples]
    name, url = f"gsm8k@v{STEPS}", serving.url()
    models = json.loads(wait_until_it_answers(f"{url}/models", serving.process, serving.log))
    assert {name, "base"} == {model["id"] for model in models["data"]}
    asked = {"model": name, "prompt": prompts, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    choices = post(f"{url}/completions", asked)["choices"]
    given = {"model": name, "prompt": prompts[:8], "max_tokens": 1, "echo": True, "logprobs": 0}
    scored = post(f"{url}/completions", given)["choices"]
    curl = wait_until_it_says(r"^  (curl .*)\n", serving.process, serving.log)
    assert json.loads(shell(curl).stdout)["model"] == name
    assert [choice["index"] for choice in choices] == list(range(32))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(run.adapter)
    ).eval()
    # Teacher forcing: every token vLLM chose must be the argmax of stock peft, given the same text before it.
    for prompt, choice in zip(prompts, choices, strict=True):
        completion = choice["token_ids"]
        assert completion
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion
    gaps = []
    for prompt, choice in zip(prompts, scored, strict=False):  # scored at once, by the adapter
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        found = torch.tensor(choice["logprobs"]["token_logprobs"][1 : len(prompt)])
        gaps.append(float((found - expected).abs().max()))
    assert sorted(gaps)[-2] <= 1e-3, "a tie between experts spoils one prompt of 8 at most"


def test_the_printed_lines_for_peft_and_tensorboard_work(run: Run) -> None:
    lines = run.details
    at = next(i for i, line in enumerate(lines) if line.startswith("from peft import"))
    python = shlex.split(lines[at - 1].removeprefix("Load it with stock peft, in ").removesuffix(":"))
    code = "\n".join([*lines[at : at + 2], "print(type(model).__name__)"])
    interactive = [*python, "-i"]
    done = subprocess.run(interactive, input=code, capture_output=True, text=True, timeout=280, cwd="/", check=False)
    assert "PeftModelForCausalLM" in done.stdout, done.stderr
    log = run.folder / "tensorboard.log"
    with started(f"{run.printed('TensorBoard')} --port 0", log) as process:  # 6006 may be in use on this machine
        page = wait_until_it_answers(wait_until_it_says(r" at (http\S+) ", process, log), process, log)
    assert b"TensorBoard" in page


@contextmanager
def forked_servers(run: Run, serving: Serving) -> Iterator[None]:
    """Servers that commands start are forks; that of ``serve`` is none, and has read its configuration."""
    serving.url()
    config = run.folder / "config.json"
    forked = starter_of(ROLES["rollout.python"]).interpreter(run.folder.parent / "forked")
    rollout = run.config.rollout.model_copy(update={"python": str(forked)})
    recorded = config.read_bytes()
    config.write_text(run.config.model_copy(update={"rollout": rollout}).model_dump_json())
    try:
        yield
    finally:
        config.write_bytes(recorded)


def test_the_printed_evaluation_agrees_with_the_run(run: Run, serving: Serving) -> None:
    command = run.printed("evaluate")
    with forked_servers(run, serving):
        done = shell(command)
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy: ([0-9.]+) over 64 problems", done.stdout)
    assert found, done.stdout
    assert abs(float(found[1]) - run.summary["eval_after"]) <= 1 / 64 + 1e-4, "one near tie may fall the other way"


def test_the_printed_chat_command_talks_to_the_last_version(run: Run, serving: Serving) -> None:
    """Its greedy answer to a held-out problem is that of the run's last evaluation, beside an earlier version's."""
    evaluation = read_metrics(run.folder).evals[-1]
    assert evaluation.version == STEPS
    sample = evaluation.samples[0]
    before = versions_in(run.folder / "checkpoints" / "gsm8k")[0]
    chat = run.printed("chat")
    with forked_servers(run, serving):
        both = shell(f"{chat} --against {before} --prompt {shlex.quote(sample.prompt)}")
    assert both.stdout.startswith(f"gsm8k@v{STEPS}:\n{sample.completion.strip()}\ngsm8k@v{before}:\n"), both.stderr


def test_an_exported_version_is_the_folder_that_the_run_has_written(run: Run) -> None:
    out = run.folder / "exported"
    done = shell(f"{run.printed('chat').replace(' chat ', ' export ')} {shlex.quote(str(out))}")
    assert done.stdout == f"gsm8k@v{STEPS} in {out}\n", done.stderr
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / name).read_bytes() == (run.adapter / name).read_bytes()


def test_the_printed_resume_command_plans_the_next_steps(run: Run) -> None:
    """Not run here: `test_crash` resumes. As `plan` it passes the checks of the same start."""
    cache = shlex.quote(str(run.snapshot.parents[2]))
    done = shell(f"HF_HUB_CACHE={cache} {run.printed('resume').replace(' resume ', ' plan ')}")
    assert done.returncode == 0, done.stderr


def test_the_quickstart_shows_the_commands_that_a_run_prints(run: Run) -> None:
    shown = [shlex.split(command.text) for command in commands(ROOT / "docs" / "en" / "quickstart.md")]
    places = {"runs/embedded": str(run.folder), ".venv/bin/python": sys.executable, "examples/math/": f"{EXAMPLES}/"}
    for label, words in (("serve", "serve"), ("evaluate", "evaluate.py"), ("TensorBoard", "tensorboard.main")):
        printed = shlex.split(run.printed(label))
        [command] = [c for c in shown if any(word.endswith(words) for word in c)]
        for short, long in places.items():
            command = [word.replace(short, long) for word in command]
        assert command == printed
