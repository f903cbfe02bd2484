"""TLS in front of a server that has none, with certificates of an authority of its own."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import queue
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificates:
    """An authority in `directory`, and what it signed: PEM files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
        self.authority = directory / "ca.pem"
        self.authority.write_bytes(_pem(self._sign(self._name, self._key.public_key(), is_authority=True)))

    def make(self, name: str) -> tuple[Path, Path]:
        """Return the files of a certificate for 127.0.0.1 and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        files[0].write_bytes(_pem(self._sign(subject, key.public_key(), is_authority=False)))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        files[1].write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        return files

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool) -> x509.Certificate:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key)
        builder = builder.add_extension(identifier, critical=False)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(own, critical=False).sign(self._key, hashes.SHA256())


@contextmanager
def tls_relay(upstream_port: int, certificates: Certificates) -> Iterator[int]:
    """Give a port that takes TLS, from clients with a certificate of the authority, and leads to `upstream_port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.make("server"))
    context.load_verify_locations(certificates.authority)
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        async with server:
            ports.put(server.sockets[0].getsockname()[1])
            await asyncio.to_thread(done.wait)

    ports, done = queue.SimpleQueue[int](), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield ports.get()
    finally:
        done.set()
        thread.join()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        return  # one end has gone
    finally:
        writer.close()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
