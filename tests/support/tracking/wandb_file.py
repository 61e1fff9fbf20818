"""What W&B or SwanLab wrote offline, from its own file: ``python wandb_file.py FILE`` prints it as JSON.

Needs the package wandb or swanlab.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) of the SDK's own messages,
after a head of seven bytes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK, HEAD = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(data: bytes) -> Iterator[bytes]:
    """Every whole message."""
    at, message = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + HEAD : at + HEAD + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(part) < length:
            return
        message = part if kind in (FULL, FIRST) else message + part
        if kind in (FULL, LAST):
            yield message
        at += HEAD + length


def nested(items: dict[tuple[str, ...], object]) -> dict[str, object]:
    """Values by name, those of a dictionary in a dictionary."""
    found: dict[str, object] = {name: value for (name, *inner), value in items.items() if not inner}
    for (name, *inner), value in items.items():
        if inner:
            found.setdefault(name, {})[".".join(inner)] = value  # type: ignore[index]
    return found


def read(path: Path) -> dict[str, object]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config, summary, axes, files = [], {}, {}, {}, []
    found: dict[str, object] = {"rows": rows, "config": config, "summary": summary, "axes": axes, "files": files}
    for message in payloads(path.read_bytes()):
        record = Record.FromString(message)
        match record.WhichOneof("record_type"):
            case "history":
                items = {(*i.nested_key,) or (i.key,): json.loads(i.value_json) for i in record.history.item}
                rows.append({"step": record.history.step.num, "values": nested(items)})
            case "run":
                run = record.run
                found |= {"id": run.run_id, "project": run.project, "entity": run.entity, "name": run.display_name}
                config |= {i.key: json.loads(i.value_json) for i in run.config.update}
            case "config":
                config |= {i.key: json.loads(i.value_json) for i in record.config.update if i.key}
            case "summary":
                items = {(*i.nested_key,) or (i.key,): json.loads(i.value_json) for i in record.summary.update}
                summary |= nested(items)
            case "metric":
                axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            case "files":
                files += [file.path for file in record.files.files]
            case "exit":
                found["exit"] = record.exit.exit_code
    return found


def read_swanlab(path: Path) -> dict[str, list[tuple[int, float]]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found: dict[str, list[tuple[int, float]]] = {}
    for message in payloads(path.read_bytes()):
        record = Record.FromString(message)
        if record.WhichOneof("record_type") == "scalar":
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print(json.dumps(read_swanlab(file) if file.suffix == ".swanlab" else read(file)))
