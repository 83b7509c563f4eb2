"""A certificate authority for tests, and a Redis server that speaks TLS, by itself or through a proxy."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from aiodelay.errors import AiodelayError
from aiodelay.testing.servers import RedisServer, free_port

from .proxy import proxied

__all__ = ["Certificates", "tls_port_of"]


class Certificates:
    """The certificates of servers and clients.

    Attributes:
        ca: The file with the certificate to trust.
        client, client_key: The files of a client that the server trusts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ca = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))
        self.client, self.client_key = self.issue("client")

    def issue(self, name: str, *, until: datetime | None = None) -> tuple[Path, Path]:
        """Issue a certificate for a host. Return the files with the chain and the key."""
        issued = self._ca.issue_cert(name, not_after=until)
        chain, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return chain, key

    def keystore(self, name: str) -> Path:
        """Issue a certificate for a host. Return one file with key and chain, as Kafka's brokers need it."""
        issued, path = self._ca.issue_cert(name), self._folder / f"{name}.keystore.pem"
        key = load_pem_private_key(issued.private_key_pem.bytes(), None)
        blobs = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
        path.write_bytes(b"".join([*blobs, *(blob.bytes() for blob in issued.cert_chain_pems)]))
        return path


@asynccontextmanager
async def tls_port_of(
    program: str, certificates: Certificates, *, host: str = "127.0.0.1", until: datetime | None = None, clients: bool
) -> AsyncIterator[int]:
    """Serve TLS on a port.

    Args:
        program: The server's binary.
        certificates: The authority that issues its certificate.
        host: The host in its certificate.
        until: The end of the certificate's validity.
        clients: Whether clients must show a certificate, too.
    """
    chain, key = certificates.issue(host, until=until)
    port = free_port()
    options = ["--tls-port", port, "--tls-cert-file", chain, "--tls-key-file", key, "--tls-ca-cert-file"]
    options += [certificates.ca, "--tls-auth-clients", "yes" if clients else "no"]
    server = RedisServer(program, *map(str, options))
    try:
        try:
            server.start()
        except AiodelayError:
            if "TLS support" not in server.log and "tls-port" not in server.log:  # the server was built without TLS
                raise
        else:
            yield port
            return
        server.stop()
        server = RedisServer(program)
        server.start()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
        context.load_cert_chain(chain, key)
        context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
        async with proxied(server.port, tls=context) as proxy:
            yield proxy.port
    finally:
        server.stop()
