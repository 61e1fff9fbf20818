"""The trainer's side of the canary: ``python -m areal_lora.doctor.canary_trainer --run-folder DIR``.

A real engine with a perturbed adapter, the real publish path, and the truth check of every publish. Prints one JSON
object with the differences; errors go to standard error, as in a run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys

import torch

from areal_lora.config.recorded import probe_tolerance, read_config
from areal_lora.config.sizing.slots import broadcast_backend
from areal_lora.errors import ArealLoraError, ExitCode
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import collector_paused
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.main import join_world

B_SCALE = 0.05
SERVER_S = 120.0

log = get_logger("areal_lora.doctor.canary_trainer")  # __name__ is __main__ here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.doctor.canary_trainer", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    folder: RunFolder = parser.parse_args(argv).run_folder
    setup_logging("trainer", 0)
    try:
        with collector_paused():
            print(json.dumps(publish_perturbed(folder)), flush=True)
    except ArealLoraError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return ExitCode.DONE


def publish_perturbed(folder: RunFolder) -> dict[str, float | None]:
    """Publish an adapter whose every matrix is random; return how its log-probabilities compare."""
    from areal_lora.data.formatting import load_tokenizer
    from areal_lora.distributed.exchange import SoloExchange
    from areal_lora.engine.engines import build_engine
    from areal_lora.platforms.device import own_device
    from areal_lora.run_folder.rendezvous import read_secret, wait_endpoint
    from areal_lora.trainer.adapter import build_adapter, probe_rows
    from areal_lora.trainer.versions.publishing import AdapterPublishing
    from areal_lora.weight_sync.trainer.decisions import PublishReport
    from areal_lora.weight_sync.trainer.leader import Leader
    from areal_lora.weight_sync.trainer.membership import RendezvousWatch
    from areal_lora.weight_sync.trainer.publisher import Publisher

    config = read_config(folder)
    torch.set_num_threads(config.trainer.threads)
    join_world(config, folder, 0, 1)
    device = own_device(config.cluster.device, 0)
    engine = build_engine(config.model, config.trainer, device)
    chosen = config.adapters[0]
    adapter = build_adapter(config, chosen, probe_rows(config, chosen, load_tokenizer(config.model.folder)))
    engine.add_adapter(adapter.spec, chosen.optimizer, adapter.run.seed)
    generator = torch.Generator().manual_seed(1)
    tensors = dict(engine.export_adapter(adapter.name))
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            tensors[name] = B_SCALE * torch.randn(tensor.shape, generator=generator)
    engine.load_adapter(adapter.name, tensors)
    scores = [engine.logprobs(adapter.probe, adapter=name) for name in (None, adapter.name)]
    wait_endpoint(folder, "server", 0, SERVER_S)
    watch = RendezvousWatch(folder, config.rollout.tp)
    secret, exchange = read_secret(folder), SoloExchange()
    leader = Leader(
        run=config.run.name,
        secret=secret,
        servers=watch.present(),
        config=config.weight_sync,
        tolerance=probe_tolerance(config),
    )
    publisher = Publisher(
        run=config.run.name,
        config=config.weight_sync,
        exchange=exchange,
        leader=leader,
        sources=engine.adapter_sources(),
        secret=secret,
        bind=config.cluster.bind,
        backend=broadcast_backend(config),
        device=device,
    )
    reports: list[PublishReport] = []
    publishing = AdapterPublishing(engine, publisher, config.rollout.adapter_mode, reports.append)
    publishing.publish(adapter, 0, None)
    publishing.join(adapter.name)
    publishing.close()
    (report,) = reports
    return {
        "mean_abs": report.probe_mean_abs,
        "max_abs": report.probe_max_abs,
        "changed_by": float((scores[0] - scores[1]).abs().max()),
    }


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
