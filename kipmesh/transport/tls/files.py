"""The certificate, key and authorities of one process, from PEM files that are read again when they change.

    files = TlsFiles(TlsPaths.of(config))    # InvalidConfigError in one line when they cannot be used
    files.current                            # Material: consistent, checked, replaced as a whole
    files.close()

A thread looks at the files once in `CHECK_INTERVAL_S`: other inode, size or time of change of any of them, also behind
links as Kubernetes' volumes have them. What is read counts only if it is whole: PEM that parses, a key that fits the
certificate, files that did not change meanwhile. Otherwise the material before stays in use, `is_bad` is true, and the
log says once why. Nothing here is for an event loop to wait on: `current` is an attribute.

Users compare `current.generation` with the one that they made their credentials of, or are made for it
(`contexts.ServerContext`, `rpc.tls`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kipmesh.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from kipmesh.core.config.security import SslConfig

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
FILE_BYTES_MAX = 1 << 20
_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"

_Stamp = tuple[tuple[int, int, int, int], ...]
"""Of each file: device, inode, size, time of change in ns."""


class TlsPaths(NamedTuple):
    """Where the files are; key and certificates may be in one. Without a key there is no certificate of our own."""

    certificate: Path | None
    key: Path | None
    authorities: Path | None

    @classmethod
    def of(cls, config: SslConfig) -> TlsPaths:
        """From configuration."""
        if config.ssl_certificate_dir:
            folder = Path(config.ssl_certificate_dir)
            return cls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        own = Path(config.ssl_keystore_location) if config.ssl_keystore_location else None
        return cls(own, own, Path(config.ssl_truststore_location) if config.ssl_truststore_location else None)

    def files(self) -> tuple[Path, ...]:
        """Each file once."""
        return tuple(dict.fromkeys(path for path in self if path is not None))


class Material(NamedTuple):
    """What was read at one time; PEM."""

    generation: int
    """Another number for each content, rising."""
    certificate_chain: bytes | None
    private_key: bytes | None
    authorities: bytes | None
    not_after_s: float | None
    """When the own certificate expires, in seconds of the epoch."""
    authorities_not_after_s: float | None
    """When the first of the authorities expires."""


class TlsFiles:
    """The files of one process or client; `close` ends the thread, and so does forgetting the object."""

    def __init__(self, paths: TlsPaths, *, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self.paths = paths
        self.reloads = 0
        """How often changed files came into use."""
        self.failures = 0
        """How often changed files could not be used."""
        self.is_bad = False
        """Whether the files as they are now cannot be used, and older content still is."""
        self._lock = threading.Lock()
        self._stamp = _stamp(paths)
        self._bad_stamp: _Stamp | None = None
        self.current = _read(paths, 1)
        if _stamp(paths) != self._stamp:
            self._stamp = ()  # the next look reads again
        self._closed = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed, check_interval_s), name="tls-files", daemon=True
        )
        watcher.start()

    def check(self) -> bool:
        """Read the files if they changed; whether newer content came into use. Blocks for the time of reading."""
        with self._lock:
            before = _stamp(self.paths)
            if before in (self._stamp, self._bad_stamp):
                return False
            try:
                found = _read(self.paths, self.current.generation + 1)
            except InvalidConfigError as error:
                if _stamp(self.paths) == before:  # not about to change: whoever writes is done, or has stopped
                    self._refuse(error, before)
                return False
            if _stamp(self.paths) != before:
                return False
            self._stamp, self._bad_stamp, self.is_bad = before, None, False
            if found[1:] == self.current[1:]:
                return False
            self.current = found
            self.reloads += 1
        log.info("certificates were read again: %s", ", ".join(str(path) for path in self.paths.files()))
        return True

    def _refuse(self, error: InvalidConfigError, stamp: _Stamp) -> None:
        self._bad_stamp, self.is_bad = stamp, True
        self.failures += 1
        log.error("changed certificates cannot be used, those before stay in use: %s", error.message)

    def close(self) -> None:
        """Look at the files no more; idempotent. `current` stays."""
        self._closed.set()

    def __del__(self) -> None:
        closed = getattr(self, "_closed", None)
        if closed is not None:
            closed.set()


def _watch(files: weakref.ref[TlsFiles], closed: threading.Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        known = files()
        if known is None:
            return
        try:
            known.check()
        except Exception:  # a watcher that ended would go unnoticed until the certificates expire
            log.exception("the certificate files cannot be looked at")
        del known


def _stamp(paths: TlsPaths) -> _Stamp:
    found = []
    for path in paths.files():
        try:
            status = os.stat(path)
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, -1, -1, -1))
    return tuple(found)


def _read(paths: TlsPaths, generation: int) -> Material:
    """Everything, checked; raises InvalidConfigError."""
    contents = {path: _bytes_of(path) for path in paths.files()}
    chain = key = authorities = None
    not_after_s = authorities_not_after_s = None
    if paths.certificate is not None and paths.key is not None:
        chain, key = contents[paths.certificate], contents[paths.key]
        certificates = _certificates(paths.certificate, chain)
        _check_key(paths.key, key, certificates[0], paths.certificate)
        not_after_s = certificates[0].not_valid_after_utc.timestamp()
    if paths.authorities is not None:
        authorities = contents[paths.authorities]
        trusted = _certificates(paths.authorities, authorities)
        authorities_not_after_s = min(one.not_valid_after_utc.timestamp() for one in trusted)
    return Material(generation, chain, key, authorities, not_after_s, authorities_not_after_s)


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfigError(f"TLS: {path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"TLS: {path}: larger than {FILE_BYTES_MAX} bytes")
    return content


def _certificates(path: Path, content: bytes) -> list[Certificate]:
    """At least one; a bundle that was cut off is refused as a whole."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        found = []
    if not found or len(found) != content.count(_BEGIN_CERTIFICATE):
        raise InvalidConfigError(f"TLS: {path}: not whole certificates in PEM form")
    return found


def _check_key(path: Path, content: bytes, certificate: Certificate, certificate_path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        key = load_pem_private_key(_key_block(content), password=None)
    except TypeError:
        raise InvalidConfigError(f"TLS: {path}: a key with a password cannot be used") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidConfigError(f"TLS: {path}: not a whole private key in PEM form") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InvalidConfigError(f"TLS: the key of {path} is not that of the certificate in {certificate_path}")


def _key_block(content: bytes) -> bytes:
    """The key out of a file that has certificates as well; all of it when there is none."""
    lines = content.splitlines()
    begin = next(
        (n for n, line in enumerate(lines) if line.startswith(b"-----BEGIN ") and b"PRIVATE KEY" in line), None
    )
    if begin is None:
        return content
    end = next((n for n, line in enumerate(lines[begin:], begin) if line.startswith(b"-----END ")), len(lines))
    return b"\n".join(lines[begin : end + 1]) + b"\n"
