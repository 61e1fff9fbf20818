"""A short run of the shipped example through the launcher: real Megatron on two ranks, real vLLM, a real adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from areal_lora.obs.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"
HERE = Path(__file__).parent
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Run:
    folder: Path
    output: str
    code: int

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def adapter(self) -> Path:
        return self.folder / "adapters" / "gsm8k"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs with a space")
    command = [
        sys.executable, "-m", "areal_lora.launch",
        "--config", str(EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"), "--config", str(EXAMPLES / "embedded.yaml"),
        f"run.root={root}", "run.name=short", f"run.steps={STEPS}", "eval.every_steps=3",
        "adapters.gsm8k.sampling.prompts_per_step=24", "adapters.gsm8k.task.n_eval=64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    return Run(folder=root / "short", output=done.stdout + done.stderr, code=done.returncode)


def test_it_ends_well_and_says_what_it_made(run: Run) -> None:
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["steps"] == STEPS
    assert summary["publishes"] == STEPS + 1 == summary["publishes_probed"]
    last_lines = run.output.strip().splitlines()[-len(summary) :]
    assert {line.split(": ", 1)[0]: json.loads(line.split(": ", 1)[1]) for line in last_lines} == summary
    assert Path(summary["report_path"]).read_text().count("<svg") >= 5


def test_trainer_and_server_agree_after_every_publish(run: Run) -> None:
    publishes = read_metrics(run.folder).publishes
    assert [p.version for p in publishes] == list(range(STEPS + 1))
    for publish in publishes:
        assert publish.probe_mean_abs is not None
        assert publish.probe_mean_abs <= 1e-4, publish


def test_servers_confirm_some_of_the_batches_at_every_lag(run: Run) -> None:
    steps = read_metrics(run.folder).steps
    audited = [s for s in steps if s.audited_tokens]
    assert len(audited) >= STEPS - 2, "one answer may come a step later"
    assert any(s.staleness.get(0, 0) == 0 for s in audited), "also where no token is fresh"
    assert all(s.audit_gap is not None and s.audit_gap < 1e-4 for s in audited)


def test_staleness_is_bounded_and_rollouts_overlap_training(run: Run) -> None:
    histogram = {int(k): v for k, v in run.summary["staleness_histogram"].items()}
    assert min(histogram) >= 0
    assert max(histogram) <= 2
    assert sum(v for age, v in histogram.items() if age > 0) > 0


def test_nothing_is_left_running(run: Run) -> None:
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert [c for c in commands if str(run.folder) in c] == []


def test_secret_is_private_and_not_logged(run: Run) -> None:
    secret = run.folder / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    text = secret.read_text().strip()
    assert all(text not in log.read_text(errors="replace") for log in (run.folder / "logs").iterdir())


def test_the_exported_adapter_is_the_trained_policy_in_stock_peft(run: Run) -> None:
    """Megatron with the exported adapter loaded back, against stock peft and transformers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    out = run.folder / "scores.json"
    script = [sys.executable, str(HERE / "megatron_scores.py"), str(run.folder), str(run.adapter), str(out)]
    subprocess.run(script, env=environment, check=True, timeout=200)
    scores = json.loads(out.read_text())
    base = AutoModelForCausalLM.from_pretrained(scores["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    worst, moved = 0.0, 0.0
    for ids, ours in zip(scores["token_ids"], scores["logprobs"], strict=True):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            theirs = _logprobs(model(tokens).logits[0], ids)
            with model.disable_adapter():
                moved = max(moved, float((_logprobs(model(tokens).logits[0], ids) - theirs).abs().max()))
        worst = max(worst, float((theirs - torch.tensor(ours)[1:]).abs().max()))
    assert worst <= 1e-4
    assert moved > 0.05, "the adapter changes nothing: the comparison proves nothing"


def _logprobs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_stock_vllm_gives_the_same_greedy_answers_as_stock_peft(run: Run) -> None:
    """Stock vLLM loads the folder; of this package only the plugin for LoRA on CPU experts is active."""
    script = [sys.executable, str(HERE / "stock_vllm.py"), str(run.folder), str(run.adapter)]
    done = subprocess.run(script, check=True, timeout=200, capture_output=True, text=True)
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answers) == 32
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model_path = run.summary["model"]
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    # Teacher forcing: every token vLLM chose must be the argmax of stock peft, given the same text before it.
    for answer in answers:
        prompt, completion = answer["prompt"], answer["completion"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion
