"""The model card of an adapter, from the figures of its run."""

from __future__ import annotations

from areal_lora.config.adapter_run import adapter_named, adapter_run
from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef


def model_card(folder: RunFolder, config: Config, ref: AdapterRef, base: str, repo: str) -> str:
    """Markdown with the hub's metadata: what was trained on what, and how it measures. No paths of this machine."""
    adapter = adapter_named(config, ref.name)
    run = adapter_run(config, adapter)
    metrics = read_metrics(folder)
    evals = {
        record.name: record
        for record in metrics.evals
        if record.adapter in ("", ref.name) and record.version == ref.version
    }
    rewards = ", ".join(
        f"`{reward.kind}`" + (f" x {reward.weight:g}" if len(adapter.rewards) > 1 else "") for reward in adapter.rewards
    )
    kind = "rsLoRA" if adapter.rslora else "LoRA"
    rows = [
        ("base model", base),
        ("adapter", f"{kind}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.target_modules)}"),
        ("version", f"{ref.version}{'' if run.endless else f' of {run.steps} steps'}, seed {run.seed}"),
        ("algorithm", f"`{adapter.algorithm.kind}`, reward {rewards}"),
        ("task", f"`{adapter.task.kind}`"),
        ("samples", f"{adapter.sampling.prompts_per_step} prompts x {adapter.sampling.n_samples} answers a step"),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    found = "".join(f"- {name}: {record.figures()}\n" for name, record in evals.items()) or "- not evaluated\n"
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\ntags:\n- lora\n- reinforcement-learning\n---\n\n"
        f"# {ref.name}\n\nA LoRA adapter trained with reinforcement learning by areal_lora.\n\n"
        f"| | |\n|---|---|\n{table}\n## Evaluation\n\n{found}\n"
        f"## Use\n\n```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")\n```\n'
    )
