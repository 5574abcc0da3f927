"""Files: what Apache Kafka writes, so that its tools read them.

`LogManager` has a node's data folders, `open_log` makes a single `Log`; both through a `FileSystem` that tests can
make fail.
"""

from kipmesh.storage.errors import StorageError
from kipmesh.storage.fs import FileSystem, RealFileSystem
from kipmesh.storage.log import Log
from kipmesh.storage.log_loader import open_log
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.open_files import OpenFiles
from kipmesh.storage.validation import AppendInfo

__all__ = ["AppendInfo", "FileSystem", "Log", "LogManager", "OpenFiles", "RealFileSystem", "StorageError", "open_log"]
