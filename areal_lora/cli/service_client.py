"""One request to the service of a run, with the key in the run folder or in ``AREAL_LORA_KEY``."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_lora.cli.status import find_run
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.run_folder.atomic import replacing
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_endpoint

KEY_VARIABLE = "AREAL_LORA_KEY"
TRIES, AGAIN_S, ANSWER_S = 20, 0.5, 120.0
"""The service may be restarting: the same request, under the same idempotency key, is sent again."""


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """``where`` is a run, or the URL of its service."""

    where: str

    def get(self, path: str, **query: str | int) -> Any:
        return self._json("GET", path + (f"?{urllib.parse.urlencode(query)}" if query else ""))

    def post(self, path: str, body: object = None) -> Any:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def download(self, path: str, out: Path, **query: str) -> int:
        """Write the answer to ``out``, whole or not at all; returns its size."""
        with self._answer("GET", f"{path}?{urllib.parse.urlencode(query)}", None) as answer, replacing(out) as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            return file.tell()

    def _json(self, method: str, path: str, body: object = None) -> Any:
        with self._answer(method, path, body) as answer:
            return json.load(answer)

    def _answer(self, method: str, path: str, body: object) -> IO[bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Idempotency-Key": str(uuid.uuid4()), "Content-Type": "application/json"}
        for tries_left in reversed(range(TRIES)):
            url, key = self._place()
            request = urllib.request.Request(f"{url}{path}", data, headers, method=method)
            request.add_header("Authorization", f"Bearer {key}")
            try:
                answer: IO[bytes] = urllib.request.urlopen(request, timeout=ANSWER_S)
                return answer
            except urllib.error.HTTPError as error:
                raise _refused(error) from None
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
                if not tries_left:
                    raise RolloutError(f"{url}: the service does not answer: {error} (fix: look at its log)") from None
                time.sleep(AGAIN_S)
        raise AssertionError("the last try returns or raises")

    def _place(self) -> tuple[str, str]:
        """URL and key."""
        key = os.environ.get(KEY_VARIABLE, "")
        if self.where.startswith(("http://", "https://")):
            if not key:
                raise ConfigError(KEY_VARIABLE, "it is not set", f"export {KEY_VARIABLE}=... with your key")
            return self.where.rstrip("/"), key
        folder = find_run(self.where)
        return self._published(folder), key or _key_of(folder)

    def _published(self, folder: RunFolder) -> str:
        for tries_left in reversed(range(TRIES)):
            if (endpoint := read_endpoint(folder, "service", 0)) is not None:
                return f"http://{endpoint.host}:{endpoint.ports['api']}"
            if not folder.service_tables.exists() or not tries_left:
                break
            time.sleep(AGAIN_S)
        raise ConfigError(str(folder), "no service works there", "start the run with --serve, or wait until it is up")


def _key_of(folder: RunFolder) -> str:
    try:
        return folder.service_key.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        fix = "wait until the service is up, or set AREAL_LORA_KEY"
        raise ConfigError(str(folder.service_key), "there is no key", fix) from None


def _refused(error: urllib.error.HTTPError) -> ConfigError:
    """The service's own error; another server's is named as such."""
    try:
        detail = json.load(error)["error"]
        return ConfigError(detail["path"], detail["reason"], detail["fix"])
    except (ValueError, KeyError, TypeError):
        return ConfigError(str(error.url), f"it answers {error.code}", "check that it is the service of a run")
