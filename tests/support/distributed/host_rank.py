"""One trainer rank on a host of its own: joins worlds, adds a number, broadcasts over a weight-sync group.

``python -m tests.support.distributed.host_rank RANK`` reads worlds, ``FOLDER BIND INTERFACE``, from its standard input.
In each it prints what it found as JSON, and leaves it at the next line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from areal_lora.config.load import load_config
from areal_lora.config.sections.run import own_place
from areal_lora.distributed.store import Exchange
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.trainer.main import join_world
from areal_lora.weight_sync.link.broadcast_groups import GroupListener, join_group
from areal_lora.weight_sync.messages import SourceEndpoint
from tests.support.paths import EXAMPLES

SHIPPED = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
TIMEOUT_S = 150.0


def meet(folder: Path, rank: int, bind: str, interface: str) -> None:
    config = load_config(SHIPPED, [f"cluster.bind='{bind}'", f"cluster.interface={interface}", "cluster.nodes=2"])
    join_world(config, RunFolder(folder), rank, 2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    place = own_place(config.cluster, RunFolder(folder))
    secret, exchange = read_secret(RunFolder(folder)), Exchange(timeout_s=TIMEOUT_S)
    flat = torch.full((5000,), 7 * (1 - rank), dtype=torch.uint8)
    if rank == 0:
        listener = GroupListener(
            source=0,
            bind=place.address,
            receivers=["rank 1"],
            bucket_bytes=1000,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            secret=secret,
        )
        exchange.broadcast_bytes(msgspec.msgpack.encode(listener.endpoint))
        group = listener.accept()
    else:
        endpoint = msgspec.msgpack.decode(exchange.broadcast_bytes(None), type=SourceEndpoint)
        group = join_group(endpoint, 1, place.address, TIMEOUT_S, secret)
    group.start(flat, time.monotonic() + TIMEOUT_S).wait()
    heard = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    print(
        json.dumps(
            {
                "address": place.address,
                "interface": place.interface,
                "sum": total.item(),
                "got": flat.unique().tolist(),
                "listeners": sorted({(at.ip, at.port) for at in heard}),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    for line in sys.stdin:
        folder, *at = line.split()
        meet(Path(folder), int(sys.argv[1]), *at)
