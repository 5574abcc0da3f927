"""Creates a certificate authority and certificates, for clusters without cert-manager or another source.

    authority = Authority.make("kipmesh")
    authority.issue("leader-1", ["leader-1", "localhost", "127.0.0.1"], days=90).write(Path("certs/leader-1"))

A directory has the files of cert-manager: `tls.crt`, `tls.key`, `ca.crt`. Keys are P-256 and readable by their owner
only. Certificates are valid for servers and clients, because a node is both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kipmesh.core.errors import InvalidConfigError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
NAMES_MAX = 100
CLOCKS_DIFFER = timedelta(minutes=5)
"""Certificates are valid from this time before their creation, for machines whose clocks are late."""

CERTIFICATE_FILE, KEY_FILE, AUTHORITIES_FILE = "tls.crt", "tls.key", "ca.crt"


class Issued(NamedTuple):
    """A certificate, its key and the trusted authorities, each as PEM."""

    certificate: bytes
    key: bytes
    authorities: bytes

    def write(self, directory: Path) -> None:
        """Write the files into a directory, replacing each atomically. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / KEY_FILE, self.key, mode=0o600)
        replace_file(directory / CERTIFICATE_FILE, self.certificate)
        replace_file(directory / AUTHORITIES_FILE, self.authorities)


def replace_file(path: Path, content: bytes, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Replace a file atomically. `owner`: user id and group id of the new file. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(handle, "wb") as stream:
            if owner is not None:
                os.fchown(handle, *owner)
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str, *, days: float = AUTHORITY_DAYS) -> Self:
        """Create a self-signed authority. Raises InvalidConfigError for an invalid `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        builder = (
            _builder(subject, subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read an authority that `write` has written. Raises InvalidConfigError if a file is missing or invalid."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE_FILE).read_bytes())
            key = load_pem_private_key((directory / KEY_FILE).read_bytes(), password=None)
        except OSError as error:
            raise InvalidConfigError(f"{error.filename}: {error.strerror}") from None
        except (ValueError, TypeError):
            text = f"{directory}: {CERTIFICATE_FILE} and {KEY_FILE} must be the certificate and key of an authority"
            raise InvalidConfigError(text) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidConfigError(f"{directory / KEY_FILE}: must be an elliptic curve key")
        return cls(certificate, key)

    def write(self, directory: Path) -> None:
        """Write certificate and key into a directory, which should be readable by its owner only. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / KEY_FILE, _private_pem(self.key), mode=0o600)
        replace_file(directory / CERTIFICATE_FILE, self.pem)

    @property
    def pem(self) -> bytes:
        """The authority's certificate as PEM."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self, name: str, names: Sequence[str], *, days: float = CERTIFICATE_DAYS, trust: Iterable[bytes] = ()
    ) -> Issued:
        """Issue a certificate.

        `name` is the common name, `names` are 1 to NAMES_MAX alternative names (DNS names, IP addresses, URIs) and
        `trust` has PEM certificates of further authorities to trust. Raises InvalidConfigError for an invalid name, or
        too few or too many names.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_subject(name), self.certificate.subject, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName(_alternative_names(names)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        authorities = b"".join(dict.fromkeys([self.pem, *trust]))
        return Issued(certificate.public_bytes(Encoding.PEM), _private_pem(key), authorities)


def _subject(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise InvalidConfigError(f"{name!r} is not a valid common name: {error}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    if not names or len(names) > NAMES_MAX:
        raise InvalidConfigError(f"a certificate must have 1 to {NAMES_MAX} names, got {len(names)}")
    parsed: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            parsed.append(_alternative_name(name))
        except ValueError:
            raise InvalidConfigError(f"{name!r} is neither a DNS name, nor an IP address, nor a URI") from None
    return parsed


def _alternative_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ip_address(name.strip("[]")))
    except ValueError:
        if not name or name != name.strip() or any(sign in name for sign in " /:,@"):
            raise
        return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
