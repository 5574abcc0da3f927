"""What an experiment's YAML file says: hypothesis, cluster, workload, faults, and the steady state to keep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

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
    """A file that is no experiment; the text is one line."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def _target(text: str) -> str:
    if not _TARGET.fullmatch(text):
        raise ValueError(
            f"{text!r} is none of leader:N, follower:N (a partition's number or `any`), "
            "controller:active|other|any, broker:any, coordinator, node:NAME, all:brokers|controllers|nodes"
        )
    return text


def _texts(value: Any) -> Any:
    """Configuration as texts: YAML makes numbers and booleans of what looks like them."""
    if not isinstance(value, dict):
        return value
    return {key: _text(one) if isinstance(one, (bool, int, float)) else one for key, one in value.items()}


def _text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


Target = Annotated[str, AfterValidator(_target)]
Config = Annotated[Mapping[str, str], BeforeValidator(_texts)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Span = Annotated[tuple[Seconds, Seconds], AfterValidator(lambda span: tuple(sorted(span)))]


class ClusterPart(_Part):
    """The cluster; `config` is for every node that knows the key."""

    controllers: Literal[1, 3, 5] = 3
    leaders: Annotated[int, Field(ge=0, le=9)] = 1
    followers: Annotated[int, Field(ge=0, le=9)] = 2
    config: Config = {}


class GroupPart(_Part):
    """A consumer group that reads the topic as well; its members commit what they have read."""

    members: Annotated[int, Field(ge=1, le=64)] = 3
    commit_interval_s: Seconds = 0.5
    churn_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Time on average until a member leaves or dies, and another one comes; null: none does."""
    config: Config = {}
    """Of each member."""


class WorkloadPart(_Part):
    """One topic, producers with several records in flight (producer n writes to partition n), consumers by rack."""

    partitions: Annotated[int, Field(ge=1, le=64)] = 2
    replication_factor: Annotated[int, Field(ge=1, le=9)] = 3
    topic_config: Config = {}
    producers: Annotated[int, Field(ge=1, le=64)] = 4
    records_per_s: Annotated[float, Field(gt=0, le=1000)] = 20
    """Of each producer, at most."""
    value_bytes: Annotated[int, Field(ge=16, le=100_000)] = 100
    racks: Annotated[tuple[str, ...], Field(max_length=9)] = ("rack-a", "rack-b", "rack-c")
    group: GroupPart | None = None
    probes: bool = True
    """Whether plain fetches watch each replica by itself."""
    producer_config: Config = {}
    consumer_config: Config = {}

    @model_validator(mode="after")
    def _check(self) -> WorkloadPart:
        if self.producers < self.partitions:
            raise ValueError("fewer producers than partitions: progress of each could not be told")
        return self


class Fault(_Part):
    """What all faults have in common."""

    kind: str
    target: Target
    at_s: Seconds = 0
    """When it begins, after the workload runs. Not for random ones."""
    for_s: Seconds = 3
    """How long it lasts. Of random ones `random.for_s` says that."""
    halts: bool = False
    """Whether writes and reads may stand still while it lasts."""
    settle_s: Seconds = 0
    """And for so long after it."""

    def describe(self) -> str:
        """For people."""
        return f"{self.kind} {self.target}"


class Kill(Fault):
    """SIGKILL; started again at the end."""

    kind: Literal["kill"]


class Pause(Fault):
    """SIGSTOP, SIGCONT at the end."""

    kind: Literal["pause"]


class Restart(Fault):
    """SIGTERM; started again at the end."""

    kind: Literal["restart"]


class Cut(Fault):
    """A network partition: bytes that go to (`in`), from (`out`) or both ways are held back until the end."""

    kind: Literal["cut"]
    direction: Literal["both", "in", "out"] = "both"
    peers: Literal["nodes", "brokers", "controllers", "clients", "everybody"] = "nodes"
    """From whom: the other nodes, some of them, the clients, or all of those."""

    @property
    def is_total(self) -> bool:
        """Whether nobody hears the node and it hears nobody: what a cluster without a proxy between nodes can do."""
        return self.direction == "both" and self.peers == "everybody"

    def describe(self) -> str:  # noqa: D102
        way = {"both": "in both directions", "in": "hears nothing", "out": "says nothing"}[self.direction]
        return f"{self.target} cut off from {self.peers}, {way}"


class Delay(Fault):
    """The network is slow between a node and its peers, in both directions."""

    kind: Literal["delay"]
    delay_ms: Annotated[float, Field(gt=0, le=60_000)] = 100
    peers: Literal["nodes", "brokers", "controllers", "clients", "everybody"] = "nodes"

    def describe(self) -> str:  # noqa: D102
        return f"{self.delay_ms:g} ms between {self.target} and {self.peers}"


class FullDisk(Fault):
    """No byte is free on the disk of a node's data until the end. Needs Linux and namespaces: see `disk`."""

    kind: Literal["full-disk"]


class FailedFolder(Fault):
    """The second data folder of a broker fails until the end; then it is restarted. Needs what FullDisk does."""

    kind: Literal["failed-folder"]


class TornTail(Fault):
    """SIGKILL, and a part of what was not synced of the partition's log is gone; started again at the end."""

    kind: Literal["torn-tail"]


class BitFlip(Fault):
    """SIGKILL, and one bit of what was not synced of the partition's log is another; started again at the end."""

    kind: Literal["bit-flip"]


class ClockJump(Fault):
    """The wall clock of a node's process jumps, and back at the end; what measures durations does not, as on Linux."""

    kind: Literal["clock-jump"]
    jump_s: Annotated[float, Field(ge=-1e9, le=1e9)] = 3600

    def describe(self) -> str:  # noqa: D102
        return f"the clock of {self.target} jumps by {self.jump_s:+g} s"


class CpuPressure(Fault):
    """Others want the processor where the node runs, in its own container, until the end. On Kubernetes alone."""

    kind: Literal["cpu-pressure"]
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes that do nothing but count."""

    def describe(self) -> str:  # noqa: D102
        return f"{self.workers} busy processes beside {self.target}"


class MemoryPressure(Fault):
    """Memory of the node's container is taken until so much of its limit is in use. On Kubernetes alone."""

    kind: Literal["memory-pressure"]
    share: Annotated[float, Field(gt=0, le=0.95)] = 0.9
    """Of the container's limit, what the node itself uses included."""

    def describe(self) -> str:  # noqa: D102
        return f"{self.share:.0%} of the memory of {self.target} taken"


AnyFault = Annotated[
    Kill
    | Pause
    | Restart
    | Cut
    | Delay
    | FullDisk
    | FailedFolder
    | TornTail
    | BitFlip
    | ClockJump
    | CpuPressure
    | MemoryPressure,
    Field(discriminator="kind"),
]


class Chance(NamedTuple):
    """One of the faults that come by chance."""

    pause_s: float
    """How long the mesh is left alone before it."""
    fault: Fault
    for_s: float


class RandomPart(_Part):
    """Faults by chance, one after the other until the end; the next comes when all replicas are in sync again."""

    faults: Annotated[tuple[AnyFault, ...], Field(min_length=1)]
    pause_s: Span = (0.5, 3)
    for_s: Span = (0.5, 5)

    @model_validator(mode="after")
    def _check(self) -> RandomPart:
        for number, fault in enumerate(self.faults):
            if fault.model_fields_set & {"at_s", "for_s"}:
                raise ValueError(f"faults.{number}: random faults have no at_s and for_s of their own")
        return self

    def plan(self, seed: int) -> Iterator[Chance]:
        """What a seed brings, without an end: how many of them there is time for, the mesh and the machine decide."""
        source = Random(seed)
        while True:
            pause_s, fault = source.uniform(*self.pause_s), source.choice(self.faults)
            yield Chance(pause_s, fault, source.uniform(*self.for_s))


class SteadyState(_Part):
    """What holds all the time, faults or not; null asks for nothing."""

    write_gap_s: Seconds | None = 5
    """Longest time without an acknowledged write, in each partition."""
    read_delay_s: Seconds | None = 8
    """Longest time from a write's acknowledgement until each consumer has read it."""
    recovered_within_s: Seconds = 30
    """After the last fault: every replica is in sync again."""

    @property
    def limits(self) -> Limits:
        """For the checker."""
        return Limits(self.write_gap_s, self.read_delay_s)


class Experiment(_Part):
    """One file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    hypothesis: Annotated[str, Field(min_length=1)]
    duration_s: Annotated[float, Field(gt=0, le=86_400)]
    """How long the workload runs under faults; what is still broken then is undone."""
    cluster: ClusterPart = ClusterPart()
    workload: WorkloadPart = WorkloadPart()
    faults: tuple[AnyFault, ...] = ()
    random: RandomPart | None = None
    steady_state: SteadyState = SteadyState()

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        brokers = self.cluster.leaders + self.cluster.followers
        if self.workload.replication_factor > brokers:
            raise ValueError(f"replication_factor {self.workload.replication_factor} with {brokers} brokers")
        for number, timed in enumerate(self.faults):
            if timed.at_s >= self.duration_s:
                raise ValueError(f"faults.{number}: at_s {timed.at_s:g} is after the end")
        if self.faults and self.random is not None:
            raise ValueError("either `faults` or `random`")
        for fault in self.all_faults:
            self._check_target(fault)
        return self

    def _check_target(self, fault: Fault) -> None:
        what, _, which = fault.target.partition(":")
        if what in ("leader", "follower") and which != "any" and int(which) >= self.workload.partitions:
            raise ValueError(f"there is no partition {which} for {fault.target}")
        if what == "coordinator" and self.workload.group is None:
            raise ValueError("there is no coordinator without workload.group")
        if isinstance(fault, TornTail | BitFlip | FailedFolder) and (
            what == "controller" or fault.target in ("all:controllers", "all:nodes") or "controller-" in which
        ):
            raise ValueError(f"{fault.kind} is for brokers, {fault.target} is not")
        if isinstance(fault, TornTail | BitFlip | FailedFolder) and what == "all":
            raise ValueError(f"{fault.kind} of all replicas would lose what only they have")

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Those that happen or may happen."""
        return self.faults + (self.random.faults if self.random is not None else ())

    @property
    def needs_network(self) -> bool:
        """Whether nodes are to reach each other by links."""
        return any(isinstance(fault, Cut | Delay) for fault in self.all_faults)

    @property
    def needs_disks(self) -> bool:
        """Whether nodes are to have a disk of their own."""
        return any(isinstance(fault, FullDisk | FailedFolder) for fault in self.all_faults)

    @property
    def needs_folders(self) -> bool:
        """Whether brokers are to have two data folders."""
        return any(isinstance(fault, FailedFolder) for fault in self.all_faults)

    @property
    def needs_clocks(self) -> bool:
        """Whether nodes are to have a clock of their own."""
        return any(isinstance(fault, ClockJump) for fault in self.all_faults)


def load(file: Path, *, duration_s: float | None = None) -> Experiment:
    """The experiment of a file; raises ExperimentError, OSError.

    With another duration, faults that would begin after it are left out.
    """
    with file.open("rb") as stream:
        data = stream.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ExperimentError(f"{file}: larger than {FILE_BYTES_MAX} bytes")
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExperimentError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    try:
        experiment = Experiment.model_validate(document)
        if duration_s is None:
            return experiment
        kept = [fault for fault in experiment.faults if fault.at_s < duration_s]
        return Experiment.model_validate(
            {**experiment.model_dump(exclude_unset=True), "duration_s": duration_s, "faults": _dumped(kept)}
        )
    except ValidationError as error:
        raise ExperimentError(f"{file}: {_explained(error)}") from None


def _dumped(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    return [fault.model_dump(exclude_unset=True) for fault in faults]


_KEYS, _LIST = "keys with values are needed", "a list is needed"
_SHAPES = {
    "model_type": _KEYS,
    "model_attributes_type": _KEYS,
    "dict_type": _KEYS,
    "mapping_type": _KEYS,
    "tuple_type": _LIST,
    "list_type": _LIST,
}
"""What pydantic tells about the wrong kind of value, in YAML's words."""
_FOUND = (
    (bool, "true or false"),
    (dict, "keys with values"),
    (list, "a list"),
    (str, "a text"),
    (type(None), "nothing"),
)


def _explained(error: ValidationError) -> str:
    """Each thing that is wrong, with its place; the tag of a fault's kind is no part of that."""
    told = []
    kinds = {"kill", "pause", "restart", "cut", "delay", "full-disk", "failed-folder"}
    kinds |= {"torn-tail", "bit-flip", "clock-jump", "cpu-pressure", "memory-pressure"}
    for one in error.errors(include_url=False, include_context=False):
        place = ".".join(str(part) for part in one["loc"] if part not in kinds)
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] in _SHAPES:
            found = next((name for kind, name in _FOUND if isinstance(one["input"], kind)), "a number")
            message = f"{_SHAPES[one['type']]}, not {found}"
        elif one["type"] == "union_tag_not_found":
            message = f"`kind` is missing, one of {', '.join(sorted(kinds))}"
        if one["loc"] == ("random",) and isinstance(one["input"], list):
            message += " (the list is `random.faults`)"
        told.append(f"{place}: {message}" if place else message)
    return "; ".join(told)
