"""The messages of kipmesh, each declared once, and the table of APIs.

`schema` defines what a declaration is, `apis` has the requests and responses, `records` what logs and snapshots hold.
`kafka` and `proto` compile codecs from the declarations, `table` lists the APIs, `proto_files` writes `protos/`.
Nothing here depends on the rest of kipmesh or does I/O.
"""

from kipmesh.messages.apis.broker_lifecycle import *
from kipmesh.messages.apis.cluster import *
from kipmesh.messages.apis.configs import *
from kipmesh.messages.apis.connection import *
from kipmesh.messages.apis.credentials import *
from kipmesh.messages.apis.elections import *
from kipmesh.messages.apis.faults import *
from kipmesh.messages.apis.fetch import *
from kipmesh.messages.apis.fetch_sessions import *
from kipmesh.messages.apis.fetch_snapshot import *
from kipmesh.messages.apis.group_offsets import *
from kipmesh.messages.apis.groups import *
from kipmesh.messages.apis.log_dirs import *
from kipmesh.messages.apis.metadata import *
from kipmesh.messages.apis.offsets import *
from kipmesh.messages.apis.produce import *
from kipmesh.messages.apis.producer_ids import *
from kipmesh.messages.apis.quorum import *
from kipmesh.messages.apis.reassignments import *
from kipmesh.messages.apis.topics import *
