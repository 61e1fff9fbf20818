"""A stub of the hub's API on loopback, as far as making a repository and one commit need it."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class HubStub:
    """``made`` are repositories as asked for, ``files`` what commits brought, ``tokens`` who asked. Use ``with``."""

    made: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    refuses: int = 0
    url: str = ""

    def __enter__(self) -> HubStub:
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"siblings": [], "id": "me/math", "sha": "0" * 40})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.tokens.add(self.headers.get("Authorization", ""))
                path = self.path.partition("?")[0]
                if stub.refuses:
                    return self.answer(stub.refuses, {"error": "no"})
                if path == "/api/repos/create":
                    stub.made.append(json.loads(body))
                    return self.answer(200, {"url": f"{stub.url}/me/math", "name": "me/math", "id": "1"})
                if "/preupload/" in path:
                    asked = json.loads(body)["files"]
                    rows = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
                    return self.answer(200, {"files": rows})
                if "/commit/" in path:
                    for line in map(json.loads, body.decode().splitlines()):
                        if line["key"] == "header":
                            stub.messages.append(line["value"]["summary"])
                        else:
                            assert line["key"] == "file"
                            stub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    return self.answer(
                        200, {"commitUrl": f"{stub.url}/me/math/commit/1", "commitOid": "1", "success": True}
                    )
                if path == "/api/validate-yaml":
                    return self.answer(200, {"errors": [], "warnings": []})
                return self.answer(404, {"error": path})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
