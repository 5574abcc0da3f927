"""`ssl.SSLContext` objects that follow changes of certificate files. Open connections are not affected by a change.

    files = TlsFiles(TlsPaths.of(config))
    context = ServerContext(files, client_auth=config.ssl_client_auth)
    server = await asyncio.start_server(handle, host, port, ssl=context.reloading())

TLS 1.2 and newer. Sessions are not resumed, so that each connection is verified with the current authorities. The
caller limits the time of a handshake, for example with asyncio's `ssl_handshake_timeout`.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from kipmesh.transport.tls.files import Material, TlsFiles

_VERIFY = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class ServerContext:
    """SSL contexts of one listener. Thread-safe.

    `client_auth`: whether clients may or must present a certificate. `alpn`: protocol names to offer.
    """

    def __init__(
        self, files: TlsFiles, *, client_auth: Literal["none", "requested", "required"], alpn: tuple[str, ...] = ()
    ) -> None:
        self._files = files
        self._client_auth = client_auth
        self._alpn = alpn
        self._lock = threading.Lock()
        self._generation, self._context = self._make()

    def current(self) -> ssl.SSLContext:
        """Return a context for one connection, with the files' current content; the same one until the files change."""
        with self._lock:
            if self._generation != self._files.current.generation:
                self._generation, self._context = self._make()
            return self._context

    def reloading(self) -> ssl.SSLContext:
        """Return a context for the life of a listener, which uses `current()` at each handshake."""
        _, outer = self._make()

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.current()

        outer.sni_callback = choose
        return outer

    def _make(self) -> tuple[int, ssl.SSLContext]:
        material = self._files.current
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.verify_mode = _VERIFY[self._client_auth]
        _load(context, material)
        if self._alpn:
            context.set_alpn_protocols(list(self._alpn))
        return material.generation, context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a client context that checks the server's name. Create one for each connection to use new files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, files.current)
    return context


def _load(context: ssl.SSLContext, material: Material) -> None:
    if material.authorities is not None:
        context.load_verify_locations(cadata=material.authorities.decode("ascii", errors="replace"))
    if material.certificate_chain is not None and material.private_key is not None:
        with _as_file(material.private_key + b"\n" + material.certificate_chain) as path:
            context.load_cert_chain(path)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Provide `content` as a file, in memory if possible, because OpenSSL reads keys from files only."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("kipmesh-tls", os.MFD_CLOEXEC)
        try:
            with open(handle, "wb", closefd=False) as stream:
                stream.write(content)
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name
