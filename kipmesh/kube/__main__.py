"""`python -m kipmesh.kube prepare`, in an init container, and `... leave`, in a preStop hook: see these modules.

`hold`, `resume`, `press` and `relieve` are for chaos: see `inside`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kipmesh.core.errors import InvalidConfigError
from kipmesh.kube import inside, prepare
from kipmesh.kube.api import KubeError
from kipmesh.node.settings import from_overrides

INSIDE: dict[str, tuple[str, Callable[[argparse.Namespace], None]]] = {
    "hold": ("SIGSTOP for this pod's node", lambda _: inside.signal_node(signal.SIGSTOP)),
    "resume": ("SIGCONT for it", lambda _: inside.signal_node(signal.SIGCONT)),
    "press": (
        "take processor and memory of this container",
        lambda options: inside.press(options.cpu, options.memory_share, options.for_s),
    ),
    "relieve": ("an end to that", lambda _: inside.relieve()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 and a line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "prepare":
            _prepare(options)
            return 0
        if options.command in INSIDE:
            INSIDE[options.command][1](options)
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
        more = [_listener(text, options) for text in options.listener or ()]
        member = prepare.Member(
            options.pod, options.first_id, options.service, options.port, [*more, *_outside(options)]
        )
    rack = prepare.rack_of(options.node, options.label) if options.node and options.label else None
    if options.node and options.label and rack is None:
        print(f"kipmesh.kube: node {options.node} has no label {options.label}: no rack", file=sys.stderr, flush=True)
    prepare.write(options.base, options.out, member, options.rack_key, rack)


def _listener(text: str, options: argparse.Namespace) -> prepare.Listener:
    name, colon, port = text.partition(":")
    if not (name and colon and port.isdigit()):
        raise ValueError(f"--listener={text} is not NAME:PORT")
    return prepare.Listener(name, f"{options.pod}.{options.service}", int(port))


def _outside(options: argparse.Namespace) -> list[prepare.Listener]:
    if options.external is None:
        return []
    namespace, slash, service = (options.external_service or "").partition("/")
    if not (namespace and slash and service):
        raise ValueError(f"--external-service={options.external_service} is not NAMESPACE/NAME")
    outside = prepare.Outside(options.external, namespace, service, options.external_host, options.node)
    return [prepare.from_outside(outside)]


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
    make.add_argument("--listener", metavar="NAME:PORT", action="append", help="a further one; repeatable")
    make.add_argument("--external", metavar="NAME", help="the listener for clients outside of Kubernetes")
    make.add_argument("--external-service", metavar="NAMESPACE/NAME", help="the pod's own Service for them")
    make.add_argument("--external-host", metavar="HOST", help="what they are told; by default what Kubernetes says")
    make.add_argument("--node", help="name of the node of Kubernetes that the pod runs on: its label is the rack")
    make.add_argument("--label", help="that label; left out, there is no rack")
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
    for name, (text, _) in INSIDE.items():
        inner = commands.add_parser(name, help=text)
        if name == "press":
            inner.add_argument("--cpu", type=int, default=0, help="busy processes")
            inner.add_argument("--memory-share", type=float, default=0.0, help="of the container's limit, in use then")
            inner.add_argument("--for-s", type=float, default=60.0, help="longest time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
