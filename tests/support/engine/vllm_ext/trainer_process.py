"""A trainer of one rank as a process that may be killed: publishes what stdin says.

A line ``VERSION SEED [TENSORS]`` publishes the adapter made from SEED; with TENSORS the process kills itself after
packing so many of them, or right after publishing, where that is ``after``. Answers with a line per version.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from areal_lora.config.models import Config, WeightSyncConfig
from areal_lora.run_folder.paths import RunFolder, raise_session
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publish_job import Pack
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.engine.vllm_ext.serving import adapter
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(pack: Pack, tensors: int) -> Pack:
    def packed(flat: Tensor) -> Iterator[int]:
        for done in pack(flat):
            yield done
            if done == tensors:
                time.sleep(0.2)  # what is packed gets onto the wire
                die()

    return packed


def main(folder: Path) -> None:
    setattr(WeightSyncConfig, "ping_s", 30.0)  # noqa: B010 (a property): a server that stands still is not dead
    config = Config.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    model, spec = Path(config.model.path), config.adapters[0].spec(config.model.path)
    watch = RendezvousWatch(RunFolder(folder), 1)
    sync = config.weight_sync.model_copy(update={"bucket_mib": 0.01})
    leader = Leader(
        run=config.run.name,
        secret=read_secret(RunFolder(folder)),
        servers=watch.present(),
        config=sync,
        watch=watch,
        session=raise_session(RunFolder(folder)),
    )
    publisher = Publisher(
        run=config.run.name, config=sync, exchange=SoloExchange(), leader=leader, secret=read_secret(RunFolder(folder))
    )
    print("ready", flush=True)
    for line in sys.stdin:
        version, seed, *fault = line.split()
        tensors = adapter(model, int(seed))
        layout = make_layout(spec, "float32", {0: [(n, tuple(t.shape)) for n, t in tensors.items()]}, {})
        pack = pack_of(layout, 0, tensors)
        if fault and fault[0] != "after":
            pack = dying(pack, int(fault[0]))
        ref = AdapterRef(name="math", version=int(version))
        began = time.monotonic()
        report = publisher.publish(ref, None, layout, pack, base_digest(model), None).wait()
        print(f"{report.ref} {report.attempts} {time.monotonic() - began:.2f}", flush=True)
        if fault:
            die()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
