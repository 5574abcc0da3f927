"""The messages of kipmesh, each declared once, and the table of APIs.

`schema` defines what a declaration is, `apis` has the requests and responses, `records` what logs and snapshots hold.
`kafka` and `proto` compile codecs from the declarations, `responses` derives errors, `table` lists the APIs.
Nothing here depends on the rest of kipmesh or does I/O.
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

# Type checkers see the imports above. At run time every module is found, so a new one needs none of them: typed code
# can import the module itself (`from kipmesh.messages.apis import new_module as m`).
for _module in _modules_in(_apis):
    for _name, _value in vars(_module).items():
        if getattr(_value, "__module__", "") == _module.__name__ and globals().setdefault(_name, _value) is not _value:
            # gRPC has all messages in one package.
            raise TypeError(f"{_name} is declared in {_module.__name__} and in {globals()[_name].__module__}")
