"""One process of an examination: ``python -m areal_lora.doctor.node --folder DIR`` writes the facts of its node.

With ``--backend`` it is one of ``--world`` processes that broadcast to each other, and rank 0 writes the bandwidth.
Rank and world may come from srun (SLURM_PROCID). The rendezvous is a file in the shared folder, so no port is needed
but those that gloo or NCCL open themselves.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec

from areal_lora.config.models import Config
from areal_lora.doctor.probes import BandwidthFacts, node_name, probe_folder, probe_node
from areal_lora.errors import ConfigError
from areal_lora.network.addresses import find_place, set_variables
from areal_lora.run_folder.atomic import write_file

CONFIG = "examined.json"
NBYTES, TIMES, MEET_S = 32 << 20, 4, 60.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.doctor.node", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", "0")))
    args = parser.parse_args(argv)
    folder: Path = args.folder
    config = Config.model_validate_json((folder / CONFIG).read_bytes())
    if args.backend is None:
        facts = probe_node(config, probe_folder(config.run.root), folder)
        write_file(folder / f"node-{node_name()}.json", msgspec.json.encode(facts))
    else:
        speed = bandwidth(config, folder, args.backend, args.rank, args.world)
        if args.rank == 0:
            (folder / f"bandwidth-{args.backend}.json").write_bytes(msgspec.json.encode(speed))
    return 0


def bandwidth(config: Config, folder: Path, backend: str, rank: int, world: int) -> BandwidthFacts:
    """Broadcast from rank 0 on the configured network, several times; an error is a ``problem``."""
    import torch
    import torch.distributed as dist

    cluster, limit = config.cluster, timedelta(seconds=MEET_S)
    try:
        set_variables(find_place(bind=cluster.bind, interface=cluster.interface, nodes=cluster.nodes, peers=()))
        store = dist.FileStore(str(folder / f"store-{backend}"), world)
        store.set_timeout(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        data = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu")
        dist.broadcast(data, 0)
        started = time.monotonic()
        for _ in range(TIMES):
            dist.broadcast(data, 0)
        dist.barrier()
        took_s = time.monotonic() - started
        store.set(f"host-{rank}", node_name())
        hosts = [store.get(f"host-{i}").decode() for i in range(world)]
        dist.destroy_process_group()
        return BandwidthFacts(backend=backend, hosts=hosts, gbit_s=8e-9 * NBYTES * TIMES / took_s)
    except (ConfigError, RuntimeError, OSError) as error:  # torch raises its errors of groups as RuntimeError
        last = str(error).strip().splitlines()
        return BandwidthFacts(backend=backend, hosts=[node_name()], problem=last[0] if last else "failed")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
