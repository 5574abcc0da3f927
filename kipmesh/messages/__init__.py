"""The messages of kipmesh, each declared once, and the table of APIs.

`schema` defines declarations, `apis` contains requests and responses, `records` the records of logs and snapshots.
`kafka` and `proto` compile codecs from the declarations, `responses` derives error responses, `table` lists the APIs.
The package does no I/O and does not import the rest of kipmesh.
"""

from kipmesh.messages import apis as _apis
from kipmesh.messages.apis.admin.configs import *
from kipmesh.messages.apis.admin.credentials import *
from kipmesh.messages.apis.admin.elections import *
from kipmesh.messages.apis.admin.faults import *
from kipmesh.messages.apis.admin.log_dirs import *
from kipmesh.messages.apis.admin.reassignments import *
from kipmesh.messages.apis.admin.topics import *
from kipmesh.messages.apis.admin.unregister_broker import *
from kipmesh.messages.apis.broker_lifecycle import *
from kipmesh.messages.apis.cluster import *
from kipmesh.messages.apis.connection import *
from kipmesh.messages.apis.fetch import *
from kipmesh.messages.apis.fetch_sessions import *
from kipmesh.messages.apis.fetch_snapshot import *
from kipmesh.messages.apis.group_offsets import *
from kipmesh.messages.apis.groups import *
from kipmesh.messages.apis.metadata import *
from kipmesh.messages.apis.offsets import *
from kipmesh.messages.apis.produce import *
from kipmesh.messages.apis.producer_ids import *
from kipmesh.messages.apis.quorum import *
from kipmesh.messages.schema import modules_in as _modules_in

# The imports above are for type checkers. At run time all modules are imported, so a new module needs no line above if
# typed code imports it directly (`from kipmesh.messages.apis import new_module as m`).
for _module in _modules_in(_apis):
    for _name, _value in vars(_module).items():
        if getattr(_value, "__module__", "") == _module.__name__ and globals().setdefault(_name, _value) is not _value:
            # Protobuf has all messages in one package.
            other = globals()[_name].__module__
            raise TypeError(f"{_name} is declared in both {_module.__name__} and {other}; rename one of them")
