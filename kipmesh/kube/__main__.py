"""`python -m kipmesh.kube prepare` (init container) and `leave` (preStop hook): see the modules of these names.

`hold`, `resume`, `press` and `relieve` inject faults: see `inside`.
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
    "hold": ("pause this pod's node (SIGSTOP)", lambda _: inside.signal_node(signal.SIGSTOP)),
    "resume": ("resume this pod's node (SIGCONT)", lambda _: inside.signal_node(signal.SIGCONT)),
    "press": (
        "put CPU and memory pressure on this container",
        lambda options: inside.press(options.cpu, options.memory_share, options.for_s),
    ),
    "relieve": ("end the pressure", lambda _: inside.relieve()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 on success, or 1 after an error, which is printed as one line on stderr.

    `leave` also returns 1 if the broker stops without being drained, or while partitions still need it. Raises
    SystemExit for invalid arguments (exit code 2).
    """
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
            leave.PodRef(options.namespace, options.stateful_set, options.pod, options.lease),
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
            options.pod, options.first_id, options.service, options.port, [*more, *_external_listeners(options)]
        )
    rack = prepare.rack_of(options.node, options.label) if options.node and options.label else None
    if options.node and options.label and rack is None:
        print(
            f"kipmesh.kube: node {options.node} has no label {options.label}: rack is not set",
            file=sys.stderr,
            flush=True,
        )
    prepare.write(options.base, options.out, member, options.rack_key, rack)


def _listener(text: str, options: argparse.Namespace) -> prepare.Listener:
    name, colon, port = text.partition(":")
    if not (name and colon and port.isdigit()):
        raise ValueError(f"--listener must be NAME:PORT, got {text!r}")
    return prepare.Listener(name, f"{options.pod}.{options.service}", int(port))


def _external_listeners(options: argparse.Namespace) -> list[prepare.Listener]:
    if options.external is None:
        return []
    namespace, slash, service = (options.external_service or "").partition("/")
    if not (namespace and slash and service):
        raise ValueError(f"--external-service must be NAMESPACE/NAME, got {options.external_service!r}")
    external = prepare.ExternalService(options.external, namespace, service, options.external_host, options.node)
    return [prepare.external_listener(external)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kipmesh.kube", description="Commands of the Helm chart's pods.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="write the configuration of this pod's node")
    make.add_argument("--base", type=Path, required=True, help="properties file that all pods of the StatefulSet share")
    make.add_argument("--out", type=Path, required=True, help="properties file to write")
    make.add_argument("--pod", help="name of the StatefulSet's pod")
    make.add_argument("--first-id", type=int, default=0, help="node.id of the pod with ordinal 0")
    make.add_argument("--service", default="", help="fully qualified name of the headless service")
    make.add_argument("--port", type=int, default=0, help="port of the listener MESH")
    make.add_argument("--listener", metavar="NAME:PORT", action="append", help="another listener; repeatable")
    make.add_argument("--external", metavar="NAME", help="name of the listener for clients outside Kubernetes")
    make.add_argument("--external-service", metavar="NAMESPACE/NAME", help="Service of this pod for these clients")
    make.add_argument("--external-host", metavar="HOST", help="host to advertise to them. Default: from Kubernetes")
    make.add_argument("--node", help="Kubernetes node of the pod, whose label is the rack")
    make.add_argument("--label", help="node label with the rack. Default: no rack")
    make.add_argument("--rack-key", default="broker.rack", help="configuration key of the rack")
    leave = commands.add_parser("leave", help="wait until this pod's broker may stop; drain it if it is scaled down")
    leave.add_argument("--namespace", required=True)
    leave.add_argument("--stateful-set", required=True)
    leave.add_argument("--pod", required=True)
    leave.add_argument("--lease", required=True, help="Lease shared by all brokers of the release")
    leave.add_argument("--first-id", type=int, required=True, help="node.id of the pod with ordinal 0")
    leave.add_argument("--bootstrap", required=True, help="bootstrap addresses: comma-separated host:port")
    leave.add_argument("--config", metavar="KEY=VALUE", action="append", help="a client setting; repeatable")
    leave.add_argument("--timeout-s", type=float, default=300.0, help="limit for waiting, in seconds; not for draining")
    for name, (text, _) in INSIDE.items():
        inner = commands.add_parser(name, help=text)
        if name == "press":
            inner.add_argument("--cpu", type=int, default=0, help="number of busy processes")
            inner.add_argument(
                "--memory-share", type=float, default=0.0, help="share of the memory limit to bring into use"
            )
            inner.add_argument("--for-s", type=float, default=60.0, help="seconds after which the pressure ends")
    return parser


if __name__ == "__main__":
    sys.exit(main())
