"""Files of a node, in the formats of Apache Kafka so that Kafka's tools can read them.

`LogManager` manages the data directories of a node. `open_log` opens a single `Log`. Both use a `FileSystem`, which
tests replace to inject errors.
"""

from kipmesh.storage.fs import FileSystem, OpenFiles, RealFileSystem, StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log.log_loader import open_log
from kipmesh.storage.log.validation import AppendInfo
from kipmesh.storage.log_manager import LogManager

__all__ = ["AppendInfo", "FileSystem", "Log", "LogManager", "OpenFiles", "RealFileSystem", "StorageError", "open_log"]
