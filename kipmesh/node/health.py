"""`python -m kipmesh.node.health [PORT] [--path /readyz|/healthz]`: health check of the process in this container.

For containers without curl. It runs every few seconds and therefore imports almost nothing. The path is `/readyz` by
default. The address is taken from `KIPMESH_CONFIG_HTTP_LISTENER` if set. With `https://`, the certificate's names are
not checked, because the check uses a loopback address; the process's own certificate is presented in case it requires
one. Exit code 0: the response is 200; 1: another response or none; 2: wrong usage. The reason is printed in one line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # avoids the import of `typing`
if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 4.0
RESPONSE_BYTES_MAX = 4096
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
VARIABLE = "KIPMESH_CONFIG_HTTP_LISTENER"
CERTIFICATES = "KIPMESH_CONFIG_SSL_CERTIFICATE_DIR"
USAGE = "usage: python -m kipmesh.node.health [PORT] [--path /readyz|/healthz]"


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one health check and return the exit code: 0 for status 200, 1 for a failed check, 2 for wrong usage."""
    words = list(arguments)
    path = "/readyz"
    if "--path" in words:
        option = words.index("--path")
        path = words[option + 1] if option + 1 < len(words) else ""
        del words[option : option + 2]
    listener = environment.get(VARIABLE) or (f"0.0.0.0:{words[0]}" if words else "")
    scheme, separator, address = listener.rpartition("://")
    host, port = _address(address)
    if separator and scheme not in ("http", "https"):
        port = 0
    if len(words) > 1 or not path.startswith("/") or not port:
        print(USAGE, file=sys.stderr)
        return EXIT_USAGE
    try:
        status, text = get(host, port, path, _context(environment.get(CERTIFICATES)) if scheme == "https" else None)
    except (OSError, ValueError) as error:
        print(f"no response from {host}:{port}{path}: {error}")
        return EXIT_FAILED
    print(text)
    return EXIT_OK if status == 200 else EXIT_FAILED


def _context(certificates: str | None) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificates:
        context.load_cert_chain(os.path.join(certificates, "tls.crt"), os.path.join(certificates, "tls.key"))
    return context


def get(host: str, port: int, path: str, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    """Send a GET request and return the status and the stripped body of the response.

    Raises OSError if the connection fails or one of its operations takes longer than TIMEOUT_S, ValueError if the
    response is not HTTP.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), TIMEOUT_S))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        response = b""
        while len(response) < RESPONSE_BYTES_MAX and (more := connection.recv(RESPONSE_BYTES_MAX)):
            response += more
    head, _, body = response.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("the response is not HTTP")
    return int(words[1]), body.decode(errors="replace").strip()


def _address(listener: str) -> tuple[str, int]:
    """Return the host and port of a listener. A wildcard host becomes loopback; an invalid port becomes 0."""
    host, _, port = listener.rpartition(":")
    host = host.strip("[]")
    wildcards = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return wildcards.get(host, host), int(port) if port.isdecimal() and int(port) <= 65535 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
