"""`kipmesh broker logdirs`: a broker's data folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    BrokerId,
    Dir,
    admin_client,
    bootstrap_of,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client.log_dirs import LogDirDescription


def logdirs(
    broker_id: BrokerId,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show a broker's data folders: the size of each partition there, or why the folder is offline."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[LogDirDescription]:
        async with admin_client(address, timeout_s) as admin:
            return await admin.describe_log_dirs(broker_id)

    found = run(work)
    if as_json:
        for one in found:
            print_json(
                {
                    "broker_id": broker_id,
                    "log_dir": one.log_dir,
                    "error": one.error.code.name if one.error else None,
                    "error_message": one.error.message if one.error else None,
                    "total_bytes": one.total_bytes,
                    "usable_bytes": one.usable_bytes,
                    "partitions": [
                        {"topic": where.topic, "partition": where.partition, **info._asdict()}
                        for where, info in sorted(one.replicas.items())
                    ],
                }
            )
        return
    for one in found:
        state = f"OFFLINE: {one.error.message}" if one.error else f"{one.usable_bytes} of {one.total_bytes} bytes free"
        print(f"{one.log_dir}  {state}")
    rows = [
        (where.topic, where.partition, info.size_bytes, info.offset_lag, one.log_dir)
        for one in found
        for where, info in one.replicas.items()
    ]
    print_table(("TOPIC", "PARTITION", "BYTES", "LAG", "FOLDER"), sorted(rows))
