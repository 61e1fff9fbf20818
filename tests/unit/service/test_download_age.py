"""What is encrypted here, age's own implementation (pyrage) decrypts."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys

import pytest

from areal_lora.errors import RequestError
from areal_lora.service.download import CHUNK_BYTES, encrypted, recipient_key
from tests.support.wheels import installed

KEYS = "import pyrage, json; ids = [pyrage.x25519.Identity.generate() for _ in range(2)];"
MAKE = KEYS + "print(json.dumps([[str(i), str(i.to_public())] for i in ids]))"
OPEN = (
    "import pyrage, json, sys, base64; asked = json.load(sys.stdin);"
    "own = [pyrage.x25519.Identity.from_str(asked['key'])];"
    "print(json.dumps([base64.b64encode(pyrage.decrypt(base64.b64decode(f), own)).decode() for f in asked['files']]))"
)


def pyrage(program: str, text: str = "") -> object:
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        env={"PYTHONPATH": str(installed("pyrage"))},
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    found: object = json.loads(done.stdout)
    return found


def test_each_recipient_opens_files_of_every_length() -> None:
    keys = pyrage(MAKE)
    assert isinstance(keys, list)
    plain = [bytes(i % 251 for i in range(n)) for n in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1)]
    plain.append(b"x" * (3 * CHUNK_BYTES))
    recipients = [public for _, public in keys]
    files = [base64.b64encode(b"".join(encrypted(io.BytesIO(each), recipients))).decode() for each in plain]
    for identity, _ in keys:
        opened = pyrage(OPEN, json.dumps({"key": identity, "files": files}))
        assert isinstance(opened, list)
        assert [base64.b64decode(each) for each in opened] == plain


@pytest.mark.parametrize(
    "key",
    [
        "",
        "age1",
        "ssh-ed25519 AAAA",
        "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8q",  # one letter is another
        "age1" + "q" * 58,
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    recipient_key("age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p")
    with pytest.raises(RequestError):
        recipient_key(key)
