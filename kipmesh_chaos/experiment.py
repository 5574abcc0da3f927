"""Experiment files (YAML): hypothesis, cluster, workload, faults and steady state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kipmesh.core.config.validation import error_text
from kipmesh_chaos.history import Limits

FILE_BYTES_MAX = 1 << 20
_TARGET = re.compile(
    r"(?:(?:leader|follower):(?:\d{1,4}|any))"
    r"|controller:(?:active|other|any)"
    r"|broker:any"
    r"|coordinator"
    r"|node:[a-z]+-\d{1,2}"
    r"|all:(?:brokers|controllers|nodes)"
)


class ExperimentError(Exception):
    """An experiment file is too large or invalid. The message is one line."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def _target(text: str) -> str:
    if not _TARGET.fullmatch(text):
        raise ValueError(
            f"unknown target {text!r}, use leader:N or follower:N (a partition or `any`), "
            "controller:active|other|any, broker:any, coordinator, node:NAME or all:brokers|controllers|nodes"
        )
    return text


def _strings(value: Any) -> Any:
    """Convert scalar values of a configuration to strings: YAML parses some of them as numbers and booleans."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(one).lower() if isinstance(one, bool) else str(one) if isinstance(one, (int, float)) else one
        for key, one in value.items()
    }


Peers = Literal["nodes", "brokers", "controllers", "clients", "everybody"]
Target = Annotated[str, AfterValidator(_target)]
Config = Annotated[Mapping[str, str], BeforeValidator(_strings)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Span = Annotated[tuple[Seconds, Seconds], AfterValidator(lambda span: tuple(sorted(span)))]


class ClusterPart(_Part):
    """Number of nodes by role. `config` are properties; a node gets those that exist for its role."""

    controllers: Literal[1, 3, 5] = 3
    leaders: Annotated[int, Field(ge=0, le=9)] = 1
    followers: Annotated[int, Field(ge=0, le=9)] = 2
    config: Config = {}


class GroupPart(_Part):
    """A consumer group whose members read the topic and commit their progress."""

    members: Annotated[int, Field(ge=1, le=64)] = 3
    commit_interval_s: Seconds = 0.5
    churn_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Mean seconds between replacements of a random member, which leaves or dies; null: members stay."""
    config: Config = {}
    """Client configuration of each member."""


class WorkloadPart(_Part):
    """One topic, producers (idempotent ones have several records in flight), a consumer per rack, and optionally a
    group.

    Each producer writes to one partition; partitions are assigned round robin. There are at least as many producers as
    partitions.
    """

    partitions: Annotated[int, Field(ge=1, le=64)] = 2
    replication_factor: Annotated[int, Field(ge=1, le=9)] = 3
    topic_config: Config = {}
    producers: Annotated[int, Field(ge=1, le=64)] = 4
    records_per_s: Annotated[float, Field(gt=0, le=1000)] = 20
    """Maximum number of records per second of each producer."""
    value_bytes: Annotated[int, Field(ge=16, le=100_000)] = 100
    racks: Annotated[tuple[str, ...], Field(max_length=9)] = ("rack-a", "rack-b", "rack-c")
    group: GroupPart | None = None
    probes: bool = True
    """Whether plain fetches from each broker observe its replicas separately."""
    producer_config: Config = {}
    consumer_config: Config = {}

    @model_validator(mode="after")
    def _check(self) -> WorkloadPart:
        if self.producers < self.partitions:
            raise ValueError(f"{self.partitions} partitions need at least as many producers, got {self.producers}")
        return self


class Fault(_Part):
    """Fields that all faults have. `target` selects nodes, such as `leader:0` or `broker:any`."""

    kind: str
    target: Target
    at_s: Seconds = 0
    """Start, in seconds after the warm-up. Not for random faults."""
    for_s: Seconds = 3
    """Duration in seconds. For random faults `random.for_s` applies."""
    halts: bool = False
    """Whether writes and reads may stop during the fault and for `settle_s` after it."""
    settle_s: Seconds = 0
    """Seconds after the end of a halting fault in which writes and reads may still stop."""

    text: ClassVar[str] = "{kind} {target}"

    def describe(self) -> str:
        """Return a short description for the report, such as `kill leader:0`."""
        return self.text.format_map(self.__dict__)


class Kill(Fault):
    """The node's process gets SIGKILL. The node is restarted at the end of the fault."""

    kind: Literal["kill"]


class Pause(Fault):
    """The node's process gets SIGSTOP, and SIGCONT at the end of the fault."""

    kind: Literal["pause"]


class Restart(Fault):
    """The node's process gets SIGTERM and stops cleanly. The node is restarted at the end of the fault."""

    kind: Literal["restart"]


class Cut(Fault):
    """A network partition. Bytes to the node (`in`), from it (`out`) or in both directions are held back until the end
    of the fault.
    """

    text = "{target} cut off from {peers}, direction {direction}"
    kind: Literal["cut"]
    direction: Literal["both", "in", "out"] = "both"
    peers: Peers = "nodes"
    """Peers that are cut off from the node: `nodes` (all other nodes), `brokers`, `controllers`, `clients`, or nodes
    and clients.
    """

    @property
    def is_total(self) -> bool:
        """Whether the node is cut off from all nodes and clients in both directions, which also works without proxies
        between the nodes.
        """
        return self.direction == "both" and self.peers == "everybody"


class Delay(Fault):
    """Latency of `delay_ms` between the node and its peers, in each direction."""

    text = "{delay_ms:g} ms between {target} and {peers}"
    kind: Literal["delay"]
    delay_ms: Annotated[float, Field(gt=0, le=60_000)] = 100
    peers: Peers = "nodes"


class FullDisk(Fault):
    """The disk with the node's data is full until the end of the fault. A local cluster needs Linux namespaces: see
    `disk`.
    """

    kind: Literal["full-disk"]


class FailedLogDir(Fault):
    """The second log directory of a broker fails until the end of the fault; then the broker is restarted.

    Needs Linux namespaces: see `disk`.
    """

    kind: Literal["failed-folder"]


class TornTail(Fault):
    """A broker gets SIGKILL, and part of the unsynced bytes of the target's partition (of each partition if the target
    names none) is cut off. The broker is restarted at the end of the fault.
    """

    kind: Literal["torn-tail"]


class BitFlip(Fault):
    """A broker gets SIGKILL, and one unsynced bit of the target's partition (of each partition if the target names
    none) is flipped. The broker is restarted at the end of the fault.
    """

    kind: Literal["bit-flip"]


class ClockJump(Fault):
    """The wall clock of a node's process jumps by `jump_s` seconds, and back at the end of the fault. Monotonic clocks
    are not affected.
    """

    text = "the clock of {target} jumps by {jump_s:+g} s"
    kind: Literal["clock-jump"]
    jump_s: Annotated[float, Field(ge=-1e9, le=1e9)] = 3600


class CpuPressure(Fault):
    """Busy processes run in the node's container until the end of the fault. Kubernetes only."""

    text = "{workers} busy processes beside {target}"
    kind: Literal["cpu-pressure"]
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of busy processes."""


class MemoryPressure(Fault):
    """Memory of the node's container is allocated until `share` of its limit is in use, and freed at the end of the
    fault. Kubernetes only.
    """

    text = "{share:.0%} of the memory of {target} in use"
    kind: Literal["memory-pressure"]
    share: Annotated[float, Field(gt=0, le=0.95)] = 0.9
    """Share of the container's limit, including the node's own memory."""


AnyFault = Annotated[
    Kill
    | Pause
    | Restart
    | Cut
    | Delay
    | FullDisk
    | FailedLogDir
    | TornTail
    | BitFlip
    | ClockJump
    | CpuPressure
    | MemoryPressure,
    Field(discriminator="kind"),
]


class Chance(NamedTuple):
    """One fault of a random plan, with its duration in seconds."""

    pause_s: float
    """Seconds without faults before it."""
    fault: Fault
    for_s: float


class RandomPart(_Part):
    """Random faults, one at a time. Each one starts only when all replicas are in sync. `pause_s` and `for_s` are
    ranges in seconds.
    """

    faults: Annotated[tuple[AnyFault, ...], Field(min_length=1)]
    pause_s: Span = (0.5, 3)
    for_s: Span = (0.5, 5)

    @model_validator(mode="after")
    def _check(self) -> RandomPart:
        for number, fault in enumerate(self.faults):
            if fault.model_fields_set & {"at_s", "for_s"}:
                raise ValueError(f"faults.{number}: random faults take no at_s and for_s, use random.for_s")
        return self

    def plan(self, seed: int) -> Iterator[Chance]:
        """Yield an endless sequence of random faults, which depends only on the seed."""
        source = Random(seed)
        while True:
            pause_s, fault = source.uniform(*self.pause_s), source.choice(self.faults)
            yield Chance(pause_s, fault, source.uniform(*self.for_s))


class SteadyState(_Part):
    """Limits in seconds that hold during the whole run; null disables a limit."""

    write_gap_s: Seconds | None = 5
    """Longest time without an acknowledged write, per partition."""
    read_delay_s: Seconds | None = 8
    """Longest time from the acknowledgement of a write until each consumer has read it."""
    recovered_within_s: Seconds = 30
    """Seconds after the last fault within which all replicas must be in sync."""

    @property
    def limits(self) -> Limits:
        """The progress limits that the checker applies."""
        return Limits(self.write_gap_s, self.read_delay_s)


class Experiment(_Part):
    """Contents of an experiment file. Faults are either timed (`faults`) or random (`random`)."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    hypothesis: Annotated[str, Field(min_length=1)]
    duration_s: Annotated[float, Field(gt=0, le=86_400)]
    """Duration of the fault phase in seconds. Faults that remain at its end are undone."""
    cluster: ClusterPart = ClusterPart()
    workload: WorkloadPart = WorkloadPart()
    faults: tuple[AnyFault, ...] = ()
    random: RandomPart | None = None
    steady_state: SteadyState = SteadyState()

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        brokers = self.cluster.leaders + self.cluster.followers
        if self.workload.replication_factor > brokers:
            raise ValueError(f"replication_factor {self.workload.replication_factor} exceeds {brokers} brokers")
        for number, timed in enumerate(self.faults):
            if timed.at_s >= self.duration_s:
                raise ValueError(f"faults.{number}: at_s must be less than duration_s, got {timed.at_s:g}")
        if self.faults and self.random is not None:
            raise ValueError("`faults` and `random` exclude each other")
        for fault in self.all_faults:
            self._check_target(fault)
        return self

    def _check_target(self, fault: Fault) -> None:
        role, _, selector = fault.target.partition(":")
        if role in ("leader", "follower") and selector != "any" and int(selector) >= self.workload.partitions:
            raise ValueError(f"target {fault.target}: partition {selector} does not exist")
        if role == "coordinator" and self.workload.group is None:
            raise ValueError("target coordinator needs workload.group")
        if not isinstance(fault, TornTail | BitFlip | FailedLogDir):
            return
        if role == "controller" or fault.target in ("all:controllers", "all:nodes") or "controller-" in selector:
            raise ValueError(f"{fault.kind} applies to brokers only, got {fault.target}")
        if role == "all":
            raise ValueError(f"{fault.kind} of all replicas would lose acknowledged records")

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """All faults that may happen, timed and random."""
        return self.faults + (self.random.faults if self.random is not None else ())

    def has(self, *kinds: type[Fault]) -> bool:
        """Whether a fault of one of these classes may happen."""
        return any(isinstance(fault, kinds) for fault in self.all_faults)

    @property
    def needs_disks(self) -> bool:
        """Whether each node needs a separate disk, for full disks or failed log directories."""
        return self.has(FullDisk, FailedLogDir)


def load(file: Path, *, duration_s: float | None = None) -> Experiment:
    """Load an experiment file. Raises ExperimentError for a file above 1 MiB, invalid YAML or invalid values, and
    OSError.

    `duration_s`, if not None, replaces the duration in the file; timed faults that start later are dropped.
    """
    with file.open("rb") as stream:
        data = stream.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ExperimentError(f"{file}: file must not be larger than {FILE_BYTES_MAX} bytes")
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExperimentError(f"{file}: invalid YAML: {' '.join(str(error).split())}") from None
    try:
        experiment = Experiment.model_validate(document)
        if duration_s is None:
            return experiment
        kept = [fault.model_dump(exclude_unset=True) for fault in experiment.faults if fault.at_s < duration_s]
        return Experiment.model_validate(
            {**experiment.model_dump(exclude_unset=True), "duration_s": duration_s, "faults": kept}
        )
    except ValidationError as error:
        raise ExperimentError(f"{file}: {_error_line(error)}") from None


def _error_line(error: ValidationError) -> str:
    """Return one line with all errors and their places, without the tag of the fault's kind."""
    lines = []
    kinds = {get_args(fault.model_fields["kind"].annotation)[0] for fault in Fault.__subclasses__()}
    for one in error.errors(include_url=False):
        place = ".".join(str(part) for part in one["loc"] if part not in kinds)
        if one["type"] == "union_tag_not_found":
            line = f"{place}.kind is missing, use one of {', '.join(sorted(kinds))}"
        elif one["type"] == "union_tag_invalid":
            line = f"{place}.kind must be one of {', '.join(sorted(kinds))}, got {one['input'].get('kind')!r}"
        else:
            line = error_text(one, place, one["input"])
        if one["loc"] == ("random",) and isinstance(one["input"], list):
            line += " (the list belongs under `random.faults`)"
        lines.append(line)
    return "; ".join(lines)
