"""The neighbour of ``versus.py``: TRL's GRPOTrainer on the demo's model, problems, batch and LoRA.

``versus.py`` runs it with the interpreter of an environment of its own, which finds this package by PYTHONPATH. It
appends one JSON object to ``--out`` per training step and evaluation. Held-out problems, greedy decoding and the rule
for a right answer are those of a run of this package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import datasets.fingerprint
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from versus_accuracy import greedy_accuracy

from areal_lora.config.load import load_config
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import numeric_match

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
CONFIGS = (EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml")
MICRO_BATCH = 64
"""Sequences of one forward and backward pass: 8 x 64, as ours have at most 4,096 tokens."""

_fingerprints = itertools.count()


def next_fingerprint(cls: type, value: object) -> str:
    """Replace the hash of a data set by a counter: dill cannot pickle every type of pyarrow."""
    return f"{next(_fingerprints):016x}"


class Timeline(TrainerCallback):
    """Writes what happened and when. Seconds of evaluations are not counted: ``at_s`` leaves them out."""

    def __init__(self, out: Path, started_s: float, evaluate: Any) -> None:
        self.seconds = {"generate": 0.0, "reward": 0.0, "optimizer": 0.0}
        self._out, self._started_s, self._evaluate = out, started_s, evaluate
        self._evaluated_s = self._step_s = self._optimizer_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() - self._started_s - self._evaluated_s

    def write(self, **record: Any) -> None:
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def evaluate(self, step: int) -> None:
        at_s, began_s = self.now_s(), time.monotonic()
        accuracy = self._evaluate()
        self._evaluated_s += time.monotonic() - began_s
        self.write(kind="eval", step=step, at_s=at_s, accuracy=accuracy)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_s = self.now_s()
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._optimizer_s = time.monotonic()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seconds["optimizer"] += time.monotonic() - self._optimizer_s

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        at_s = self.now_s()
        rest_s = at_s - self._step_s - sum(self.seconds.values())
        phases = {**self.seconds, "forward, backward": rest_s}
        wall_s = at_s + self._evaluated_s
        self.write(kind="step", step=state.global_step, at_s=at_s, wall_s=wall_s, phases=phases)
        self.evaluate(state.global_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--started-s", type=float, required=True, help="time.monotonic() when the process was started")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override one key of the demo's configuration")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    datasets.fingerprint.Hasher.hash = classmethod(next_fingerprint)
    config = load_config(CONFIGS, options.overrides)
    adapter, sampling = config.adapters[0], config.adapters[0].sampling
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        config.model.folder, dtype=torch.float32, experts_implementation="grouped_mm"
    )
    rows = [{"prompt": s.prompt, "answer": s.answer} for s in load_samples(adapter.task, "train")]
    batch = sampling.prompts_per_step * sampling.n_samples
    micro_batch = min(MICRO_BATCH, batch)
    settings = GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=sampling.n_samples,
        max_completion_length=sampling.max_new_tokens,
        temperature=sampling.temperature,
        learning_rate=adapter.optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=adapter.optimizer.betas[0],
        adam_beta2=adapter.optimizer.betas[1],
        max_grad_norm=adapter.optimizer.max_grad_norm or 0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    held_out = load_samples(adapter.task, "eval")

    def accuracy() -> float:
        return greedy_accuracy(trainer.model, tokenizer, held_out, sampling.max_new_tokens)

    timeline = Timeline(options.out, options.started_s, accuracy)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        began_s = time.monotonic()
        scores = [float(numeric_match(c, a)) for c, a in zip(completions, answer, strict=True)]
        timeline.seconds["reward"] += time.monotonic() - began_s
        return scores

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[timeline],
    )
    generate = trainer.model.generate

    def timed(*arguments: Any, **keywords: Any) -> Any:
        began_s = time.monotonic()
        result = generate(*arguments, **keywords)
        timeline.seconds["generate"] += time.monotonic() - began_s
        return result

    trainer.model.generate = timed
    timeline.evaluate(0)
    trainer.train()


if __name__ == "__main__":
    main()
