"""`python -m kipmesh.node.health [PORT] [--path /healthz]`: whether the process in this container is ready.

For health checks of containers, which have no curl, and run every few seconds: it imports next to nothing. The port is
that of `KIPMESH_CONFIG_HTTP_LISTENER` where that is set. With `https://` there it asks by TLS; the names of the
process's certificate are not looked at, since it is asked by a loopback address, and it is shown its own certificate,
in case that it requires one. Exit code 0 for an answer of 200, 1 for any other or none, 2 for wrong usage; one line
says which.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # what `typing` has it for, without its import
if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 4.0
ANSWER_BYTES_MAX = 4096
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
VARIABLE = "KIPMESH_CONFIG_HTTP_LISTENER"
CERTIFICATES = "KIPMESH_CONFIG_SSL_CERTIFICATE_DIR"
USAGE = "usage: python -m kipmesh.node.health [PORT] [--path /readyz|/healthz]"


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Ask once; the exit code."""
    words = list(arguments)
    path = "/readyz"
    if "--path" in words:
        place = words.index("--path")
        path = words[place + 1] if place + 1 < len(words) else ""
        del words[place : place + 2]
    listener = environment.get(VARIABLE) or (f"0.0.0.0:{words[0]}" if words else "")
    scheme, separator, address = listener.rpartition("://")
    host, port = _address(address)
    if separator and scheme not in ("http", "https"):
        port = 0
    if len(words) > 1 or not path.startswith("/") or not port:
        print(USAGE, file=sys.stderr)
        return EXIT_USAGE
    try:
        status, text = ask(host, port, path, _context(environment.get(CERTIFICATES)) if scheme == "https" else None)
    except (OSError, ValueError) as error:
        print(f"no answer at {host}:{port}{path}: {error}")
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


def ask(host: str, port: int, path: str, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    """Status and text of the answer to a GET; raises OSError, ValueError."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), TIMEOUT_S))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while len(answer) < ANSWER_BYTES_MAX and (more := connection.recv(ANSWER_BYTES_MAX)):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("the answer is not HTTP")
    return int(words[1]), body.decode(errors="replace").strip()


def _address(listener: str) -> tuple[str, int]:
    """Where to ask a process that listens there, the loopback for everywhere; port 0 for no address."""
    host, _, port = listener.rpartition(":")
    host = host.strip("[]")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return everywhere.get(host, host), int(port) if port.isdecimal() and int(port) <= 65535 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
