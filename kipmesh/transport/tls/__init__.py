"""TLS for all transports: certificate files that are reloaded when they change, SSL contexts, and a test authority."""

from kipmesh.transport.tls.contexts import ServerContext, client_context
from kipmesh.transport.tls.files import Material, TlsFiles, TlsPaths

__all__ = ["Material", "ServerContext", "TlsFiles", "TlsPaths", "client_context"]
