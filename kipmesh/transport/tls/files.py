"""Certificate, key and authorities of one process, from PEM files that are reloaded when they change.

    files = TlsFiles(TlsPaths.of(config))    # raises InvalidConfigError
    files.current                            # Material: consistent, validated, replaced as a whole
    files.close()

A thread checks inode, size and modification time every `CHECK_INTERVAL_S`, also behind symbolic links as in Kubernetes
volumes. New content is used if the PEM is complete, the key matches the certificate and the files did not change while
they were read. Otherwise the previous content stays in use, `is_bad` is set and the reason is logged once. Users
compare `current.generation` with the generation of their credentials.
"""

from __future__ import annotations

import logging
import os
import re
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
"""Device, inode, size and modification time in ns of each file."""


class TlsPaths(NamedTuple):
    """Paths of the PEM files; certificate and key may be one file. None if not configured."""

    certificate: Path | None
    key: Path | None
    authorities: Path | None

    @classmethod
    def of(cls, config: SslConfig) -> TlsPaths:
        """Return the paths of a configuration: `ssl.certificate.dir`, or key store and trust store."""
        if config.ssl_certificate_dir:
            directory = Path(config.ssl_certificate_dir)
            return cls(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")
        keystore = Path(config.ssl_keystore_location) if config.ssl_keystore_location else None
        truststore = Path(config.ssl_truststore_location) if config.ssl_truststore_location else None
        return cls(keystore, keystore, truststore)

    def files(self) -> tuple[Path, ...]:
        """Return the distinct configured paths."""
        return tuple(dict.fromkeys(path for path in self if path is not None))


class Material(NamedTuple):
    """Validated content of the files, as PEM."""

    generation: int
    """Number of the content, which increases with each change."""
    certificate_chain: bytes | None
    private_key: bytes | None
    authorities: bytes | None
    not_after_s: float | None
    """Expiry of the own certificate, in seconds since 1970."""
    authorities_not_after_s: float | None
    """Earliest expiry of the authorities, in seconds since 1970."""


class TlsFiles:
    """The certificate files of one process or client, watched by a thread until `close` or garbage collection.

    Raises InvalidConfigError if the files cannot be used.
    """

    def __init__(self, paths: TlsPaths, *, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self.paths = paths
        self.reloads = 0
        """Number of changes that came into use."""
        self.failures = 0
        """Number of changes that were invalid."""
        self.is_bad = False
        """Whether the files are invalid now, so that older content is in use."""
        self._lock = threading.Lock()
        self._stamp = _stamp(paths)
        self._bad_stamp: _Stamp | None = None
        self.current = _read(paths, 1)
        if _stamp(paths) != self._stamp:
            self._stamp = ()  # changed while being read: the next check reads again
        self._closed = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed, check_interval_s), name="tls-files", daemon=True
        )
        watcher.start()

    def check(self) -> bool:
        """Reload the files if they have changed, and return whether new content is now in use. Blocks on file I/O.

        Invalid content is logged and counted in `failures`, not raised.
        """
        with self._lock:
            before = _stamp(self.paths)
            if before in (self._stamp, self._bad_stamp):
                return False
            try:
                material = _read(self.paths, self.current.generation + 1)
            except InvalidConfigError as error:
                if _stamp(self.paths) == before:  # otherwise the files are still being written
                    self._bad_stamp, self.is_bad = before, True
                    self.failures += 1
                    log.error("changed certificates are invalid, previous ones stay in use error=%s", error.message)
                return False
            if _stamp(self.paths) != before:
                return False
            self._stamp, self._bad_stamp, self.is_bad = before, None, False
            if material[1:] == self.current[1:]:
                return False
            self.current = material
            self.reloads += 1
        log.info("certificates reloaded files=%s", ", ".join(str(path) for path in self.paths.files()))
        return True

    def close(self) -> None:
        """Stop watching the files; `current` stays valid. Idempotent."""
        self._closed.set()

    def __del__(self) -> None:
        closed = getattr(self, "_closed", None)
        if closed is not None:
            closed.set()


def _watch(files: weakref.ref[TlsFiles], closed: threading.Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        watched = files()
        if watched is None:
            return
        try:
            watched.check()
        except Exception:  # the watcher must not end, otherwise certificates would expire unnoticed
            log.exception("checking the certificate files failed")
        del watched


def _stamp(paths: TlsPaths) -> _Stamp:
    stamps = []
    for path in paths.files():
        try:
            status = os.stat(path)
            stamps.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((-1, -1, -1, -1))
    return tuple(stamps)


def _read(paths: TlsPaths, generation: int) -> Material:
    """Read and validate all files. Raises InvalidConfigError if one is missing, too large or invalid."""
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
        authorities_not_after_s = min(certificate.not_valid_after_utc.timestamp() for certificate in trusted)
    return Material(generation, chain, key, authorities, not_after_s, authorities_not_after_s)


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfigError(f"TLS: {path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"TLS: {path}: must have at most {FILE_BYTES_MAX} bytes")
    return content


def _certificates(path: Path, content: bytes) -> list[Certificate]:
    """Return at least one certificate. Raises InvalidConfigError if any certificate of the file is incomplete."""
    from cryptography import x509

    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError:
        certificates = []
    if not certificates or len(certificates) != content.count(_BEGIN_CERTIFICATE):
        raise InvalidConfigError(f"TLS: {path}: must contain complete PEM certificates")
    return certificates


def _check_key(path: Path, content: bytes, certificate: Certificate, certificate_path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        key = load_pem_private_key(_key_block(content), password=None)
    except TypeError:
        raise InvalidConfigError(f"TLS: {path}: the private key must not have a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidConfigError(f"TLS: {path}: must contain a complete PEM private key") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InvalidConfigError(f"TLS: the key in {path} does not match the certificate in {certificate_path}")


def _key_block(content: bytes) -> bytes:
    """Return the first private key of a file that may also contain certificates, or the whole file if it has no key."""
    block = re.search(rb"^-----BEGIN [^\n]*PRIVATE KEY.*?(^-----END |\Z)[^\n]*", content, re.MULTILINE | re.DOTALL)
    return block[0] + b"\n" if block else content
