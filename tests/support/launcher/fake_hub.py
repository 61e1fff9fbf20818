"""A model hub on loopback for tests: the part of the Hub's HTTP interface that downloading a model uses."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from areal_lora.processes.watched import watched_thread


def commit_id(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(slots=True, kw_only=True)
class HubModel:
    """``commits`` maps commit ids to files, ``refs`` branches and tags to commit ids."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False


@dataclass(slots=True)
class FakeHub:
    """Serves ``models`` by name from entering to leaving. ``requests`` are (method, path) in order of arrival.

    Files named in ``stalled`` are sent by half and then held back until the hub closes.
    """

    models: dict[str, HubModel] = field(default_factory=dict)
    stalled: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloaded(self) -> list[str]:
        """The files whose contents were asked for."""
        return [path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> Self:
        hub = self

        class HubHandler(_HubHandler):
            @property
            def fake(self) -> FakeHub:
                return hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
        self._server.daemon_threads = True
        watched_thread("fake-hub", partial(self._server.serve_forever, 0.05))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> FakeHub:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.fake.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            what, revision = (parts[4], parts[5]) if len(parts) >= 6 else ("revision", "main")
            self._api("/".join(parts[2:4]), what, revision)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "RepoNotFound")

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files; None after a refusal."""
        model = self.fake.models.get(name)
        commit = model.refs.get(revision, revision) if model else revision
        if model is None:
            self._refuse(401, "RepoNotFound")
        elif model.gated:
            self._refuse(403, "GatedRepo")
        elif commit not in model.commits:
            self._refuse(404, "RevisionNotFound")
        else:
            return commit, model.commits[commit]
        return None

    def _api(self, name: str, what: str, revision: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        commit, files = found
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        about = {"id": name, "sha": commit, "siblings": [{"rfilename": e["path"], "size": e["size"]} for e in tree]}
        self._send(json.dumps(tree if what == "tree" else about).encode(), {})

    def _file(self, name: str, revision: str, path: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        commit, files = found
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        self._send(files[path], headers, stalls=path in self.fake.stalled)

    def _send(self, content: bytes, headers: dict[str, str], stalls: bool = False) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            content = content[start:]
        self.send_response(206 if start else 200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if stalls:
            self.wfile.write(content[: len(content) // 2])
            self.fake.closing.wait()
            self.close_connection = True
        else:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
