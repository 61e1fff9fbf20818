"""What each rank of a warm-start test does: an engine, `warm_start`, and a step from there."""

from __future__ import annotations

from typing import Any

import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.load import load_config
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.recorded import adapter_run
from areal_lora.data.collate import scoring_batch, split_rows
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.trainer.adapter import Adapter
from areal_lora.trainer.companions import start
from areal_lora.trainer.learn import annotate
from areal_lora.trainer.versions.checkpointing import warm_start
from tests.support.distributed.engine_ranks import (
    OPTIMIZER,
    TARGETS,
    every_token,
    forget_layout,
    loss_fn,
    make_batch,
    make_rows,
    numpy_of,
)
from tests.support.paths import EXAMPLES

EMBEDDED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def adapter_of(model: str, folder: str, rank: int, alpha: float) -> Adapter:
    fields = {"name": "a", "rank": rank, "alpha": alpha, "target_modules": list(TARGETS), "init_from": folder}
    run = load_config(EMBEDDED, ["adapters.0.algorithm.kl_coef=0.1", "adapters.0.algorithm.reference=initial"])
    config = run.adapters[0].model_copy(update=fields)
    return Adapter(
        config=config,
        run=adapter_run(run, config),
        spec=config.spec(model),
        probe=scoring_batch(make_rows()[:4], "a"),
        algorithm=build_algorithm(config.algorithm, minibatches=1, max_new_tokens=8),
    )


def start_all(cases: dict[str, tuple[str, str, dict[str, int], int, float]]) -> dict[str, Any]:
    """``cases``: name -> (model, folder, parallel sizes, rank, alpha)."""
    results = {}
    for case, (model, folder, sizes, rank, alpha) in cases.items():
        trainer = TrainerConfig(max_tokens_per_microbatch=150, **sizes)
        engine = MegatronEngine(ModelConfig(path=model, dtype="float32"), trainer, torch.device("cpu"))
        adapter, batch, seen = adapter_of(model, folder, rank, alpha), make_batch(make_rows()), {}
        every = every_token(batch)
        engine.add_adapter(adapter.spec, OptimizerConfig(lr=OPTIMIZER.lr), seed=1)
        warm_start(engine, adapter, seed=1)
        start(engine, adapter, seed=1)
        seen["state"] = engine.export_state("a").parts
        seen["wire"] = numpy_of(engine.export_adapter("a"))
        seen["logprobs"] = engine.logprobs(every, adapter="a").numpy()
        scored, base = (
            split_rows(engine.logprobs(adapter.probe, adapter=name), adapter.probe.cu_seqlens) for name in ("a", None)
        )
        seen["differs"] = max(abs(a - b) for x, y in zip(scored, base) for a, b in zip(x, y)) > 1e-4
        engine.forward_backward(batch, loss_fn, need_entropy=True)
        engine.optim_step("a", 50.0, OPTIMIZER.lr)
        seen["stepped"] = numpy_of(engine.export_adapter("a"))
        annotated = annotate(engine, adapter, every)
        assert annotated.ref_logprobs is not None
        seen["reference"] = annotated.ref_logprobs.numpy()
        seen["moved"] = engine.logprobs(every, adapter="a").numpy()
        results[case] = seen
        forget_layout()
    return results
