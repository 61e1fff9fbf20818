"""Scores held-out problems with Megatron and an adapter folder: RUN_FOLDER ADAPTER OUT.json (a test's helper)."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from areal_lora.checkpoint.adapter_io import load_peft
from areal_lora.config.models import Config
from areal_lora.data.collate import scoring_batch, split_rows
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.tasks.datasets import load_samples


def main(run_folder: Path, adapter: Path, out: Path) -> None:
    config = Config.model_validate_json((run_folder / "config.json").read_text())
    entry = config.adapters[0]
    listener = socket.create_server(("127.0.0.1", 0))
    store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], 1, is_master=True, master_listen_fd=listener.detach())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    layout = config.trainer.model_copy(update={"world_size": 1, "ep": 1})
    engine = MegatronEngine(config.model, layout, torch.device("cpu"))
    spec, tensors = load_peft(adapter)
    engine.add_adapter(spec, entry.optimizer, 0)
    engine.load_adapter(spec.name, tensors)
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder)
    samples = load_samples(entry.task, "eval")[:16]
    rows = [tokenizer.encode(s.prompt + s.answer, add_special_tokens=False) for s in samples]
    batch = scoring_batch(rows, spec.name)
    logprobs = engine.logprobs(batch, adapter=spec.name)
    result = {"model": config.model.folder, "token_ids": rows, "logprobs": split_rows(logprobs, batch.cu_seqlens)}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
