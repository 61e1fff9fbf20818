"""As much of W&B's server as its SDK needs to make a run, send it and continue it; in memory.

No server of W&B can be had for a test. The SDK is the real one; what is asked of the server is by its own words: a run
that exists answers with the end of its history, from which the SDK takes the next step.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


@dataclass
class Runs:
    """What has arrived, by the id of the run."""

    files: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    exits: dict[str, int] = field(default_factory=dict)

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.get(run, {}).get(HISTORY, [])]

    def query(self, body: dict[str, Any], url: str) -> dict[str, Any]:
        variables = body.get("variables") or {}
        text = body["query"]
        if "upsertBucket" in text:
            return {"upsertBucket": {"bucket": self._upsert(variables), "inserted": True}}
        if "RunResumeStatus" in text:
            return {"model": {**self._project(variables), "bucket": self._resumed(variables["name"])}}
        if "createRunFiles" in text:
            names = [{"name": name, "uploadUrl": f"{url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": names}}
        if "viewer" in text:
            return {
                "viewer": {"id": "1", "entity": "a-team", "username": "a-user", "flags": "{}", "teams": {"edges": []}}
            }
        if "serverInfo" in text:
            return {"serverInfo": {"features": [], "cliVersionInfo": {}}}
        if "__type" in text:
            return {}
        return {}

    def _project(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("project")
        return {"id": "1", "name": name, "entity": {"id": "1", "name": variables.get("entity") or "a-team"}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or next(iter(self.buckets))
        bucket = self.buckets.setdefault(name, {})
        bucket |= {key: value for key, value in variables.items() if value is not None}
        return {
            "id": base64.b64encode(f"Run:v1:{name}:p:e".encode()).decode(),
            "name": name,
            "displayName": bucket.get("displayName"),
            "description": None,
            "config": bucket.get("config"),
            "sweepName": None,
            "project": {**self._project(bucket), "internalId": "1"},
            "historyLineCount": len(self.history(name)),
        }

    def _resumed(self, name: str) -> dict[str, Any] | None:
        if name not in self.buckets:
            return None
        lines = self.files.get(name, {}).get(HISTORY, [])
        return {
            "id": base64.b64encode(f"Run:v1:{name}:p:e".encode()).decode(),
            "name": name,
            "summaryMetrics": "{}",
            "displayName": self.buckets[name].get("displayName"),
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(lines[-1:]),
            "eventsTail": "[]",
            "config": self.buckets[name].get("config", "{}"),
            "tags": [],
            "wandbConfig": '{"t": 1}',
            "runInfo": {"args": []},
        }

    def stream(self, run: str, body: dict[str, Any]) -> None:
        for name, part in (body.get("files") or {}).items():
            lines = self.files.setdefault(run, {}).setdefault(name, [])
            lines[part["offset"] :] = part["content"]
        if body.get("complete"):
            self.exits[run] = body.get("exitcode") or 0


@contextmanager
def wandb_server() -> Iterator[tuple[str, Runs]]:
    """Address and runs of a server."""
    runs = Runs()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            runs.keys.add(self.headers.get("Authorization", ""))
            data = self._body()
            if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                runs.stream(found[1], json.loads(data))
                self._answer({"exitcode": None, "limits": {}})
            elif self.path == "/graphql":
                self._answer({"data": runs.query(json.loads(data), url)})
            else:
                self._answer({})

        def do_PUT(self) -> None:
            runs.uploads[self.path.removeprefix("/upload/")] = self._body()
            self._answer({})

        def do_GET(self) -> None:
            self._answer({})

        def _body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

        def _answer(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield url, runs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
