"""TLS made from the run secret: same authority everywhere, no other run's or plane's server accepted."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection, create_server, gethostname

import pytest

from areal_lora.engine.vllm_ext.server.guards import write_client_files
from areal_lora.network.addresses import on_loopback
from areal_lora.network.tls import Plane, bearer_key, ca_pem, client_context, server_context
from areal_lora.run_folder.paths import RunFolder
from tests.support import shared_memory

SECRET, OTHER = "5e" * 32, "5e" * 31 + "5f"


@contextlib.contextmanager
def echo(secret: str, plane: Plane, bind: str = "127.0.0.1") -> Iterator[int]:
    """A server that sends back what it gets, over TLS; its port."""
    context = server_context(secret, plane, bind)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = listener.accept()
                with raw, contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as connection:
                    connection.sendall(connection.recv(100))

    with create_server((bind, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def answer(port: int, context: ssl.SSLContext, name: str = "localhost") -> bytes:
    with (
        create_connection(("127.0.0.1", port), timeout=120) as raw,
        context.wrap_socket(raw, server_hostname=name) as connection,
    ):
        assert connection.version() == "TLSv1.3"
        connection.sendall(b"hello")
        return connection.recv(100)


def test_every_process_makes_the_same_authority() -> None:
    code = f"from areal_lora.network.tls import *; print(ca_pem({SECRET!r}, Plane.DATA).decode(), end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.encode() == ca_pem(SECRET, Plane.DATA)
    assert len({ca_pem(secret, plane) for secret in (SECRET, OTHER) for plane in Plane}) == 6


@pytest.mark.parametrize("plane", Plane)
def test_clients_of_the_run_accept_its_servers_and_no_others(plane: Plane) -> None:
    with echo(SECRET, plane) as port:
        assert answer(port, client_context(SECRET, plane), "any name") == b"hello"
        wrong = [client_context(OTHER, plane), *(client_context(SECRET, p) for p in Plane if p != plane)]
        for context in wrong:
            with pytest.raises(ssl.SSLCertVerificationError):
                answer(port, context)
        old = client_context.__wrapped__(SECRET, plane)
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            answer(port, old)


def test_servers_have_keys_of_their_own() -> None:
    seen = set()
    for _ in range(2):
        with echo(SECRET, Plane.DATA) as port, create_connection(("127.0.0.1", port), timeout=120) as raw:
            with client_context(SECRET, Plane.DATA).wrap_socket(raw, server_hostname="localhost") as connection:
                seen.add(connection.getpeercert(binary_form=True))
    assert len(seen) == 2


def test_an_outside_client_with_the_two_files_checks_names_too(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    ca, data_key = run_folder.ca, run_folder.data_key
    write_client_files(run_folder, SECRET)
    write_client_files(run_folder, SECRET)  # every server does
    assert data_key.read_text() == bearer_key(SECRET, Plane.DATA)
    assert data_key.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [ca.name, data_key.name]
    outside = ssl.create_default_context(cafile=str(ca))
    outside.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13's default
    with echo(SECRET, Plane.DATA, "0.0.0.0") as port:
        for name in ("127.0.0.1", "localhost", gethostname()):
            assert answer(port, outside, name) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            answer(port, outside, "example.org")
        with pytest.raises(ssl.SSLCertVerificationError):
            answer(port, ssl.create_default_context())


def test_the_private_key_is_left_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = shared_memory.names()
    server_context(SECRET, Plane.ADMIN, "127.0.0.1")
    assert not list(tmp_path.iterdir())
    assert not shared_memory.left_behind(before)
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if "areal_lora-tls" in str(_target(fd))]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node7", False),
    ],
)
def test_what_is_loopback(bind: str, expected: bool) -> None:
    assert on_loopback(bind) is expected
