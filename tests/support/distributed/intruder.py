"""What a client without the run secret reads: ``python -m tests.support.distributed.intruder HOST:PORT...``.

It speaks torch's own TCPStore protocol: overwrites a key of the default group and reads it. Prints a JSON list with
the value for each listener, null where it got nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

KEY = "default_pg/0//gloo/rank_0"
PATIENCE_S = 1.5


def intrude(host: str, port: int, patience_s: float = PATIENCE_S) -> str | None:
    read: list[str] = []

    def attempt() -> None:
        with suppress(dist.DistError, RuntimeError):
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=patience_s), wait_for_workers=False)
            store.set(KEY, "mine")
            read.append(store.get(KEY).decode())

    # torch's client waits without end for an answer of a server that is not a TCPStore.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience_s)
    return read[0] if read else None


def intrude_all(listeners: list[tuple[str, int]]) -> list[str | None]:
    with ThreadPoolExecutor(len(listeners)) as pool:
        return list(pool.map(lambda at: intrude(*at), listeners))


if __name__ == "__main__":
    split = [text.rpartition(":") for text in sys.argv[1:]]
    print(json.dumps(intrude_all([(host, int(port)) for host, _, port in split])), flush=True)
    os._exit(0)  # threads of refused attempts may still wait
