"""`python -m kipmesh.kube prepare`, in an init container, and `... leave`, in a preStop hook: see these modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kipmesh.core.errors import InvalidConfigError
from kipmesh.kube import prepare
from kipmesh.kube.api import KubeError
from kipmesh.node.settings import from_overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 and a line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "prepare":
            _prepare(options)
            return 0
        from kipmesh.kube import leave

        return leave.main(
            leave.Place(options.namespace, options.stateful_set, options.pod, options.lease),
            options.first_id,
            {"bootstrap.servers": options.bootstrap, **from_overrides(options.config or ())},
            options.timeout_s,
        )
    except (KubeError, InvalidConfigError, ValueError, OSError) as error:
        print(f"kipmesh.kube: cannot {options.command}: {error}", file=sys.stderr, flush=True)
        return 1


def _prepare(options: argparse.Namespace) -> None:
    member = None
    if options.pod is not None:
        member = prepare.Member(options.pod, options.first_id, options.service, options.port)
    rack = prepare.rack_of(options.node, options.label) if options.node else None
    if options.node and rack is None:
        print(f"kipmesh.kube: node {options.node} has no label {options.label}: no rack", file=sys.stderr, flush=True)
    prepare.write(options.base, options.out, member, options.rack_key, rack)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kipmesh.kube", description="What a pod does besides its node.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="write the configuration of this pod's node")
    make.add_argument("--base", type=Path, required=True, help="properties that all pods of the kind share")
    make.add_argument("--out", type=Path, required=True, help="the file to write")
    make.add_argument("--pod", help="name of the pod, of a StatefulSet")
    make.add_argument("--first-id", type=int, default=0, help="node.id of the pod with ordinal 0")
    make.add_argument("--service", default="", help="the pod's headless service, as a whole name")
    make.add_argument("--port", type=int, default=0, help="where others reach the node")
    make.add_argument("--node", help="name of the node of Kubernetes whose label is the rack")
    make.add_argument("--label", default="topology.kubernetes.io/zone", help="that label")
    make.add_argument("--rack-key", default="broker.rack", help="configuration key of the rack")
    leave = commands.add_parser("leave", help="wait until this pod's broker may stop; drain it if it goes for good")
    leave.add_argument("--namespace", required=True)
    leave.add_argument("--stateful-set", required=True)
    leave.add_argument("--pod", required=True)
    leave.add_argument("--lease", required=True, help="the Lease that brokers of the release share")
    leave.add_argument("--first-id", type=int, required=True, help="node.id of the pod with ordinal 0")
    leave.add_argument("--bootstrap", required=True, help="brokers to begin with: host:port, separated by commas")
    leave.add_argument("--config", metavar="KEY=VALUE", action="append", help="how brokers are reached; repeatable")
    leave.add_argument("--timeout-s", type=float, default=300.0, help="longest time to wait for others, not to drain")
    return parser


if __name__ == "__main__":
    sys.exit(main())
