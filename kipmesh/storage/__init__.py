"""Files: what Apache Kafka writes, so that its tools read them.

`LogManager` has a node's data directories, `open_log` makes a single `Log`; both through a `FileSystem` that tests can
make fail.
"""

from kipmesh.storage.fs import FileSystem, OpenFiles, RealFileSystem, StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log.log_loader import open_log
from kipmesh.storage.log.validation import AppendInfo
from kipmesh.storage.log_manager import LogManager

__all__ = ["AppendInfo", "FileSystem", "Log", "LogManager", "OpenFiles", "RealFileSystem", "StorageError", "open_log"]
