"""A stub of an OpenAI-compatible API on loopback: it answers, throttles, fails, hangs or talks nonsense as told."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class JudgeStub:
    """``behave`` maps the number of a request and its body to what is sent: ``(status, headers, bytes or object)``.

    Use it with ``with``. ``most_open`` is the largest number of requests that were open at once.
    """

    behave: Callable[[int, dict[str, Any]], tuple[int, dict[str, str], Any]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_open: int = 0
    url: str = ""

    def __enter__(self) -> JudgeStub:
        lock, stub, now = threading.Lock(), self, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                nonlocal now
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    now += 1
                    stub.most_open = max(stub.most_open, now)
                    stub.bodies.append(body)
                    stub.keys.append(self.headers.get("Authorization", ""))
                    number = len(stub.bodies)
                try:
                    status, headers, sent = stub.behave(number, body)
                    data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # the client has gone
                finally:
                    with lock:
                        now -= 1

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def said(text: str, prompt_tokens: int = 100, completion_tokens: int = 10) -> tuple[int, dict[str, str], Any]:
    """A chat completion."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    message = {"role": "assistant", "content": text}
    return 200, {}, {"id": "x", "choices": [{"index": 0, "message": message}], "usage": usage}


def hang(seconds: float) -> tuple[int, dict[str, str], Any]:
    time.sleep(seconds)
    return said("Score: 1")
