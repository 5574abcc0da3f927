"""TLS without a protocol on top: certificate files that are read again when they change, and contexts made of them."""

from kipmesh.transport.tls.contexts import ServerContext, client_context
from kipmesh.transport.tls.files import Material, TlsFiles, TlsPaths

__all__ = ["Material", "ServerContext", "TlsFiles", "TlsPaths", "client_context"]
