"""TLS between the processes of a run: each HTTP plane has a certificate authority made from the run secret.

Any process with the secret derives the same authority, byte for byte, so no file must be distributed. A server
generates a key pair at its start and keeps it in memory, with a certificate that the authority signs. Clients trust
that authority and no other::

    run secret -- HKDF --> authority of the plane -- signs --> certificate of one server process
                               |
                               `--> clients of the run; ca.pem for clients outside of it

TLS 1.3 only, without early data: recorded bytes are of no use for a second connection.

Keys are derived from the run secret, one for each purpose; the secret itself is never sent over a socket. Each is
HKDF-SHA256 of the secret (RFC 5869) under a label, so that no key reveals anything about the secret or another key:

    bearer PLANE        token of a client of an HTTP plane, inside TLS
    certificate PLANE   private key of the authority of an HTTP plane
    curve ROLE          private CURVE key of one end of a zmq connection (`network.rpc.zmq_curve_keys`)
"""

import datetime
import hmac
import ipaddress
import os
import socket
import ssl
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from areal_lora.errors import ConfigError

_CONTEXT = "areal_lora 1 "  # separates these keys from whatever else the secret might be used for


class Plane(StrEnum):
    """The HTTP planes of a rollout server, and that of the gateway for remote ones."""

    ADMIN = "admin"
    DATA = "data"
    REMOTE = "remote"


def derived_key(secret: str, label: str, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=(_CONTEXT + label).encode()).derive(secret.encode())


def bearer_key(secret: str, plane: Plane) -> str:
    """Return the bearer key that admits clients to ``plane`` only."""
    return derived_key(secret, f"bearer {plane}").hex()


def authorization(secret: str, plane: Plane) -> dict[str, str]:
    """The header that a client of ``plane`` sends. Only inside TLS: whoever reads it can use it."""
    return {"Authorization": f"Bearer {bearer_key(secret, plane)}"}


def authorized(header: str | None, secret: str, plane: Plane) -> bool:
    """Whether an ``Authorization`` header carries the key of ``plane``, compared in constant time."""
    expected = authorization(secret, plane)["Authorization"]
    return hmac.compare_digest((header or "").encode(errors="surrogateescape"), expected.encode())


_OTHER_USAGE = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
# A secret is made for every start of a run, and its certificates with it: they need no other end.
_FROM, _UNTIL = (datetime.datetime(year, 1, 1) for year in (2020, 2100))


def ca_pem(secret: str, plane: Plane) -> bytes:
    """The certificate (public) of ``plane``'s authority; the same bytes in every process."""
    return _authority(secret, plane)[1].public_bytes(Encoding.PEM)


@lru_cache(maxsize=8)
def client_context(secret: str, plane: Plane) -> ssl.SSLContext:
    """For clients: the other end must be a server of this run.

    Names are not checked: addresses come from the run folder, and every server of the run may be called.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=ca_pem(secret, plane).decode())
    return context


def server_context(secret: str, plane: Plane, bind: str) -> ssl.SSLContext:
    """For a server bound to ``bind``: a fresh key pair, and a certificate for the addresses it can be reached at."""
    ca_key, ca = _authority(secret, plane)
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("areal_lora rollout server")
    certificate = (
        x509.CertificateBuilder(ca.subject, name, key.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(_names(bind)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL reads a path only. This file has a name in no folder and ends with its descriptor.
    fd = os.memfd_create("areal_lora-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        os.write(fd, certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def certified_context(certificate: Path, key: str) -> ssl.SSLContext:
    """For a server with the user's own ``certificate``. Raises ConfigError about ``key`` if it cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate)
    except OSError as error:  # ssl.SSLError is one
        fix = "name a PEM file with the certificate chain and its private key"
        raise ConfigError(key, f"{certificate}: {error}", fix) from None
    return context


@lru_cache(maxsize=8)
def _authority(secret: str, plane: Plane) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    # 16 bytes more than the order has: the remainder is uniform but for 2**-128 (FIPS 186-5, A.2.1).
    number = int.from_bytes(derived_key(secret, f"certificate {plane}", 48)) % (_ORDER - 1) + 1
    key = ec.derive_private_key(number, ec.SECP256R1())
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"areal_lora {plane} plane {subject.digest.hex()[:16]}")
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(_OTHER_USAGE.split(), False))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), int.from_bytes(subject.digest[:16]) >> 1, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(subject, critical=False)
        .sign(key, SHA256(), ecdsa_deterministic=True)
    )
    return key, certificate


def _names(bind: str) -> list[x509.GeneralName]:
    """Return the names by which outside clients may address a server bound to ``bind``; these clients check names."""
    addresses, hosts = {"127.0.0.1", "::1"}, {"localhost", socket.gethostname()}
    for text in [bind, *(a.address.partition("%")[0] for nic in psutil.net_if_addrs().values() for a in nic)]:
        try:
            addresses.add(str(ipaddress.ip_address(text)))
        except ValueError:
            if text == bind:
                hosts.add(bind)
    return [
        *(x509.DNSName(host) for host in sorted(hosts) if host.isascii()),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in sorted(addresses)),
    ]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])
