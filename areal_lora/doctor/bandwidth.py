"""Broadcast between processes of a group: ``python -m areal_lora.doctor.bandwidth --folder DIR --world N``.

Rank and world may come from srun (SLURM_PROCID). The rendezvous is a file in the shared folder, so no port is needed
but those that gloo or NCCL open themselves. Rank 0 writes the result.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from areal_lora.config.models import Config
from areal_lora.doctor.node import CONFIG
from areal_lora.doctor.probes import BandwidthFacts, node_name
from areal_lora.errors import ConfigError
from areal_lora.network.addresses import find_place, set_variables

NBYTES, TIMES, MEET_S = 32 << 20, 4, 60.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.doctor.bandwidth", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    args = parser.parse_args(argv)
    config = Config.model_validate_json((args.folder / CONFIG).read_bytes())
    cluster = config.cluster
    try:
        set_variables(find_place(bind=cluster.bind, interface=cluster.interface, nodes=cluster.nodes, peers=()))
        facts = measure(args.folder, args.backend, args.rank, args.world)
    except (ConfigError, RuntimeError, OSError) as error:  # torch raises its errors of groups as RuntimeError
        last = str(error).strip().splitlines()
        facts = BandwidthFacts(backend=args.backend, hosts=[node_name()], problem=last[0] if last else "failed")
    if args.rank == 0:
        (args.folder / f"bandwidth-{args.backend}.json").write_bytes(msgspec.json.encode(facts))
    return 0


def measure(folder: Path, backend: str, rank: int, world: int) -> BandwidthFacts:
    """Broadcast from rank 0, several times. Raises RuntimeError where the ranks do not meet."""
    store = dist.FileStore(str(folder / f"store-{backend}"), world)
    store.set_timeout(timedelta(seconds=MEET_S))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=MEET_S))
    data = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu")
    hosts: list[str] = [""] * world
    dist.broadcast(data, 0)
    started = time.monotonic()
    for _ in range(TIMES):
        dist.broadcast(data, 0)
    dist.barrier()
    took_s = time.monotonic() - started
    for i in range(world):
        store.set(f"host-{rank}", node_name())
        hosts[i] = store.get(f"host-{i}").decode()
    dist.destroy_process_group()
    return BandwidthFacts(backend=backend, hosts=hosts, gbit_s=8e-9 * NBYTES * TIMES / took_s)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
