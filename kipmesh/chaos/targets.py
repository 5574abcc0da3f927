"""Whom a fault meets: from `leader:0` to nodes, at the moment when it begins."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kipmesh.chaos.mesh import ChaosError, Node, is_broker, is_controller


class PartitionView(NamedTuple):
    """A partition's leader (-1: none) and in-sync replicas."""

    leader: int
    isr: Sequence[int]


class View(NamedTuple):
    """What is known of the mesh now; -1 when no controller is active, or nobody says who coordinates the group."""

    nodes: Sequence[Node]
    partitions: Mapping[int, PartitionView]
    active_controller: int
    coordinator: int = -1


class NoTargetError(ChaosError):
    """Nobody is it now: the partition has no leader, say."""


def resolve(target: str, view: View, source: random.Random) -> list[Node]:
    """The nodes that a target names; raises NoTargetError."""
    what, _, which = target.partition(":")
    match what:
        case "leader" | "follower":
            number = source.choice(sorted(view.partitions)) if which == "any" else int(which)
            state = view.partitions[number]
            if what == "leader":
                return [_by_id(view, state.leader, f"leader of partition {number}")]
            followers = [replica for replica in sorted(state.isr) if replica != state.leader]
            if not followers:
                raise NoTargetError(f"no follower of partition {number} is in sync")
            return [_by_id(view, source.choice(followers), "follower")]
        case "controller":
            if which == "active":
                return [_by_id(view, view.active_controller, "active controller")]
            others = [node for node in view.nodes if is_controller(node)]
            if which == "other":
                others = [node for node in others if node.node_id != view.active_controller]
            return [_one(others, source, "other controller")]
        case "broker":
            return [_one([node for node in view.nodes if is_broker(node)], source, "broker")]
        case "coordinator":
            return [_by_id(view, view.coordinator, "coordinator of the group")]
        case "node":
            found = [node for node in view.nodes if node.name == which]
            return [_one(found, source, f"node {which}")]
        case _:
            if which == "nodes":
                return list(view.nodes)
            return [node for node in view.nodes if (is_broker if which == "brokers" else is_controller)(node)]


def _by_id(view: View, node_id: int, what: str) -> Node:
    for node in view.nodes:
        if node.node_id == node_id:
            return node
    raise NoTargetError(f"there is no {what}")


def _one(nodes: Sequence[Node], source: random.Random, what: str) -> Node:
    if not nodes:
        raise NoTargetError(f"there is no {what}")
    return source.choice(list(nodes))
