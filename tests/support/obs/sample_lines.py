"""A record as sample files hold it."""

import json


def line(step: int, adapter: str = "a", chars: int = 10) -> bytes:
    return json.dumps({"kind": "sample", "adapter": adapter, "step": step, "prompt": "x" * chars}).encode()
