"""The life of brokers: registration, heartbeats, fencing, controlled shutdown, and the elections that follow.

| state                  | event                                      | then                                         |
| ---------------------- | ------------------------------------------ | -------------------------------------------- |
| any                    | registers, another incarnation is alive    | DUPLICATE_BROKER_REGISTRATION                |
| any                    | registers, was stopped uncleanly           | fenced; leaves every ISR and leadership      |
| any                    | registers, was stopped cleanly             | fenced; as if its session had ended          |
| any                    | registers without a data folder it had     | fenced; all its replicas are lost            |
| fenced                 | heartbeat, has applied its registration    | unfenced; leads where only it was missing    |
| unfenced               | no heartbeat for the session timeout       | fenced; leaves ISRs but as the last member   |
| unfenced               | its connection is lost (`sessions`)        | the same                                     |
| unfenced               | heartbeat wants to shut down               | shutting down; leaves as above               |
| shutting down          | heartbeat, all others have applied that    | fenced; told to stop                         |

Leaving for a session that ended, or for a shutdown, is one record (`fencing`); the rest are records of partitions.
A broker epoch is the offset of the registration's record. Sessions and reported log ends are in memory only; all else
follows from the image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import elections, fencing, partitions
from kipmesh.core.metadata.decision import NAME_LENGTH_MAX, CanLead, ControllerState, Decision, is_name, refusal
from kipmesh.core.metadata.elections import LogEnd
from kipmesh.core.metadata.image import BrokerState, MetadataDelta, PartitionKey, common
from kipmesh.core.metadata.records import (
    NO_LEADER,
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    PartitionChangeRecord,
    Record,
    RegisterBrokerRecord,
)
from kipmesh.core.metadata.sessions import Session

BROKERS_MAX = 10_000
WANTED_LOG_ENDS_MAX = 10_000
"""Most partitions that one heartbeat response asks about; the next ones ask for the rest."""
PROVEN_RECORDS_MAX = 100
"""Most records of single partitions that one heartbeat leads to since its broker has proved itself."""

LISTENERS_MAX = 64
FEATURES_MAX = 256
LOG_DIRS_MAX = 1000
_ID_BYTES = 16
_INT16_MAX = 2**15 - 1
_UINT16_MAX = 2**16 - 1
_INT32_MAX = 2**31 - 1


class BrokerLifecycle:
    """Decides about brokers. It reads the image, which the owner changes by the records that are returned."""

    def __init__(self, controller: ControllerState) -> None:
        self._controller = controller
        self._image = controller.image
        self._sessions = controller.sessions
        self._voters = frozenset(voter.id for voter in controller.config.voters)
        # Reported log ends of partitions without a leader: key -> broker -> (its epoch then, log end).
        self._log_ends: dict[PartitionKey, dict[int, tuple[int, LogEnd]]] = {}
        # Partitions without a leader that somebody asked to elect uncleanly, whatever their topic's configuration.
        self._wished: dict[PartitionKey, None] = {}

    def forget_decided(self, delta: MetadataDelta) -> None:
        """Drop the log ends of partitions that have a leader by now or are gone, and wishes for them."""
        for kept in (self._log_ends, self._wished):
            for key in common(kept.keys(), delta.changed_partitions):
                state = self._image.partition(*key)
                if state is None or state.leader != NO_LEADER:
                    kept.pop(key, None)
            for topic in delta.deleted_topics if kept else ():
                for partition in topic.partitions:
                    kept.pop((topic.topic_id, partition), None)

    # --- registration

    def register(
        self, request: m.BrokerRegistrationRequest, now_ms: int, next_offset: int
    ) -> Decision[m.BrokerRegistrationResponse]:
        """Register a broker; its record, the first of the decision's, must get the offset `next_offset`."""
        existing = self._image.brokers.get(request.broker_id)
        code, message = self._refusal(request, existing, now_ms)
        if code is not ErrorCode.NONE:
            return Decision((), m.BrokerRegistrationResponse(error_code=code, error_message=message))
        before = existing if existing is not None and existing.incarnation_id == request.incarnation_id else None
        epoch = next_offset if before is None else before.broker_epoch
        record = RegisterBrokerRecord(
            broker_id=request.broker_id,
            incarnation_id=request.incarnation_id,
            broker_epoch=epoch,
            end_points=tuple([BrokerEndpoint(**listener._asdict()) for listener in request.listeners]),
            features=tuple([BrokerFeature(**feature._asdict()) for feature in request.features]),
            rack=request.rack,
            fenced=before is None or before.fenced,
            in_controlled_shutdown=before is not None and before.in_controlled_shutdown,
            log_dirs=tuple(request.log_dirs),
        )
        records: list[Record] = [record]
        if before is None:
            clean = existing is not None and request.previous_broker_epoch == existing.broker_epoch
            if partitions.has_lost_directories(existing, request.log_dirs):
                can_lead = self._can_lead_without((request.broker_id,))
                records += partitions.lose_all(self._image, request.broker_id, can_lead)
            else:
                records += self._departure((request.broker_id,), unclean=not clean)
        self._sessions.touch(request.broker_id, epoch, now_ms)
        return Decision(records, m.BrokerRegistrationResponse(broker_epoch=epoch))

    def _refusal(
        self, request: m.BrokerRegistrationRequest, existing: BrokerState | None, now_ms: int
    ) -> tuple[ErrorCode, str | None]:
        cluster_id = self._controller.config.cluster_id
        if request.cluster_id != cluster_id:
            text = f"this is cluster {cluster_id!r}, the broker belongs to {request.cluster_id!r}"
            return ErrorCode.INCONSISTENT_CLUSTER_ID, refusal(text)
        fault = _registration_fault(request)
        if fault is not None:
            return ErrorCode.INVALID_REQUEST, fault
        if request.broker_id in self._voters:
            return ErrorCode.INVALID_REQUEST, (
                f"node.id {request.broker_id} is a controller's (controller.quorum.voters), a broker needs another"
            )
        if existing is None:
            if len(self._image.brokers) >= BROKERS_MAX:
                return ErrorCode.POLICY_VIOLATION, f"there are {BROKERS_MAX} brokers already"
        elif existing.incarnation_id != request.incarnation_id and self._sessions.is_live(request.broker_id, now_ms):
            return ErrorCode.DUPLICATE_BROKER_REGISTRATION, (
                f"broker {request.broker_id} is registered by another process that was heard of within "
                f"{self._sessions.timeout_ms} ms"
            )
        return ErrorCode.NONE, None

    # --- heartbeats

    def heartbeat(
        self, request: m.BrokerHeartbeatRequest, now_ms: int, next_offset: int, connection: int = 0
    ) -> Decision[m.BrokerHeartbeatResponse]:
        """A broker says that it lives, what it wants and what it knows; `next_offset` is the next record's.

        `connection` is what brought it, if the end of that will be told to `disconnected`; else 0.
        """
        broker = self._image.brokers.get(request.broker_id)
        if broker is None:
            return Decision((), m.BrokerHeartbeatResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED))
        if broker.broker_epoch != request.broker_epoch:
            return Decision((), m.BrokerHeartbeatResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
        session = self._sessions.touch(
            broker.broker_id, broker.broker_epoch, now_ms, request.current_metadata_offset, connection
        )
        caught_up = request.current_metadata_offset >= broker.broker_epoch
        fenced, should_stop = broker.fenced, False
        records: list[Record] = []
        if request.want_shut_down:
            records, should_stop = self._shut_down(broker, session, next_offset)
            fenced = fenced or should_stop
        elif broker.fenced:
            if caught_up and not request.want_fence:
                records, fenced = self._unfence(broker), False
        elif request.want_fence and now_ms - session.since_ms >= self._sessions.timeout_ms:
            # Sooner, it may be that it has only missed the controllers' change: nobody is fenced for that (ADR 7).
            records, fenced = self.fence([broker.broker_id]), True
        else:
            records = self._prove(broker, request.current_metadata_offset)
        records += partitions.directories_failed(broker, request.offline_log_dirs)
        reported = self._unchanged(self._note_log_ends(broker, request.log_ends), records)
        can_lead = self._can_lead_with(broker.broker_id, not fenced and not request.want_shut_down)
        records += self._elect_by_log_end(reported, can_lead)
        response = m.BrokerHeartbeatResponse(
            is_caught_up=caught_up,
            is_fenced=fenced,
            should_shut_down=should_stop,
            wanted_log_ends=self._wanted_log_ends(broker) if caught_up and not should_stop else (),
        )
        return Decision(records, response)

    def _unfence(self, broker: BrokerState) -> list[Record]:
        records: list[Record] = [BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=-1)]
        can_lead = self._can_lead_with(broker.broker_id, not broker.in_controlled_shutdown)
        rest = []
        for key in self._leaderless_of(broker.broker_id):
            state = self._image.topics[key[0]].partitions[key[1]]
            change = elections.elect_clean(key, state, can_lead)
            if change is not None:
                records.append(change)
            elif key in self._log_ends:
                rest.append(key)
        return records + self._elect_by_log_end(rest, can_lead)

    def _prove(self, broker: BrokerState, metadata_offset: int) -> list[Record]:
        """One event when the broker has applied the last change of all that it leads, as it has nearly always.

        Otherwise some records of partitions, so that nothing waits for ever while there is always a newer change.
        """
        unproven = self._image.unproven(broker.broker_id)
        if not unproven:
            return []
        if self._is_event and max(unproven.values()) <= metadata_offset:
            return [BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, proven=True)]
        records = [elections.proven(key) for key, offset in unproven.items() if offset <= metadata_offset]
        return records[:PROVEN_RECORDS_MAX] if self._is_event else records

    def _unchanged(self, keys: Iterable[PartitionKey], records: Collection[Record]) -> list[PartitionKey]:
        """Those of the partitions that none of the records changes, nor implies a change of."""
        changed = {
            (record.topic_id, record.partition_id) for record in records if isinstance(record, PartitionChangeRecord)
        }
        kept = [key for key in keys if key not in changed]
        for record in records:
            if fencing.is_departure(self._image.fencing_level, record):
                can_lead = fencing.successors(self._image.brokers, record)
                states = [self._image.topics[topic_id].partitions[partition] for topic_id, partition in kept]
                implied = fencing.departures(states, record.broker_id, can_lead)
                kept = [key for key, after in zip(kept, implied, strict=True) if after is None]
        return kept

    def _shut_down(self, broker: BrokerState, session: Session, next_offset: int) -> tuple[list[Record], bool]:
        """Controlled shutdown: first everything moves away; the broker stops when all others have seen that."""
        if broker.fenced:
            self._sessions.end(broker.broker_id)
            return [], True
        is_first = not broker.in_controlled_shutdown
        # Level 0: what moves away comes first, each with a record of its own.
        records = self._departure((broker.broker_id,), unclean=False) if is_first and not self._is_event else []
        if is_first:
            session.shutdown_offset = next_offset + len(records)
        elif session.shutdown_offset is None:  # told to another controller
            session.shutdown_offset = next_offset - 1
        others = [
            other.broker_id
            for other in self._image.brokers.values()
            if other.can_lead and other.broker_id != broker.broker_id
        ]
        seen = self._sessions.least_metadata_offset(others)
        should_stop = seen is None or (session.shutdown_offset is not None and seen >= session.shutdown_offset)
        if should_stop or is_first:
            records.append(
                BrokerRegistrationChangeRecord(
                    broker.broker_id, broker.broker_epoch, fenced=1 if should_stop else 0, in_controlled_shutdown=1
                )
            )
        if should_stop:
            self._sessions.end(broker.broker_id)
        return records, should_stop

    # --- fencing

    def disconnected(self, broker_id: int, connection: int, now_ms: int) -> bool:
        """A connection that brought heartbeats is over; says whether the broker is missing from now on."""
        broker = self._image.brokers.get(broker_id)
        is_missing = self._sessions.disconnected(broker_id, connection, now_ms)
        return is_missing and broker is not None and not broker.fenced

    def unheard(self) -> dict[int, Collection[tuple[str, int]]]:
        """The addresses of the brokers that should be there, and of which this controller has not heard yet."""
        found = {broker_id: self._image.brokers.get(broker_id) for broker_id in self._sessions.unheard()}
        return {
            broker_id: broker.endpoints.values()
            for broker_id, broker in found.items()
            if broker is not None and not broker.fenced
        }

    def refused(self, broker_id: int, now_ms: int) -> bool:
        """Nothing listens where the broker was; says whether it is missing from now on."""
        broker = self._image.brokers.get(broker_id)
        return broker is not None and not broker.fenced and self._sessions.refused(broker_id, now_ms)

    def expired(self, now_ms: int) -> list[int]:
        """The brokers, silent or gone, that have to be fenced; each is named again a timeout later if it was not."""
        silent = []
        for broker_id in self._sessions.expired(now_ms):
            broker = self._image.brokers.get(broker_id)
            if broker is None or broker.fenced:
                self._sessions.end(broker_id)
            else:
                self._sessions.grant(broker_id, broker.broker_epoch, now_ms)
                silent.append(broker_id)
        return silent

    def fence(self, broker_ids: Sequence[int]) -> list[Record]:
        """Fence the first of the brokers; none of the others, which are fenced next, is elected in its place.

        One event (630-16).
        """
        broker = self._image.brokers[broker_ids[0]]
        event = BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=1)
        if self._is_event:
            return [event._replace(also_gone=tuple(broker_ids[1 : fencing.ALSO_GONE_MAX + 1]))]
        return [event, *self._departure(broker_ids, unclean=False)]

    @property
    def _is_event(self) -> bool:
        """Whether what happens to a broker's partitions follows from one record."""
        return self._image.fencing_level > 0

    def _departure(self, gone: Collection[int], *, unclean: bool) -> list[Record]:
        """The first of `gone` leaves its ISRs and leaderships; none of them is elected."""
        broker_id = next(iter(gone))
        can_lead = self._can_lead_without(gone)
        topics = self._image.topics
        records: list[Record] = []
        for key in self._image.partitions_of_broker(broker_id):
            state = topics[key[0]].partitions[key[1]]
            change = elections.leave_isr(key, state, broker_id, can_lead, unclean=unclean)
            if change is not None:
                records.append(change)
        return records

    # --- elections

    def elect_pending(self) -> list[Record]:
        """Elect where the log ends told so far suffice now, since a configuration changed or a broker is gone."""
        return self._elect_by_log_end(list(self._log_ends), self._image.can_lead)

    def elect_unclean(self, keys: Sequence[PartitionKey]) -> list[Record]:
        """Elect for partitions without a leader where every replica that is here has told its log end.

        The others are asked, and elected as soon as they have, unless `withdraw` comes before.
        """
        self._wished.update(dict.fromkeys(keys))
        return self._elect_by_log_end(keys, self._image.can_lead)

    def withdraw(self, keys: Iterable[PartitionKey]) -> None:
        """Whoever asked for unclean elections waits for them no longer."""
        for key in keys:
            self._wished.pop(key, None)

    def _allows_unclean(self, key: PartitionKey, topic_name: str) -> bool:
        return key in self._wished or self._controller.unclean_allowed(topic_name)

    def _elect_by_log_end(self, keys: Iterable[PartitionKey], can_lead: CanLead) -> list[Record]:
        records: list[Record] = []
        for key in keys:
            topic = self._image.topics[key[0]]
            change = elections.elect_by_log_end(
                key,
                topic.partitions[key[1]],
                self._current_log_ends(key),
                can_lead,
                unclean_allowed=self._allows_unclean(key, topic.name),
            )
            if change is not None:
                records.append(change)
        return records

    def _current_log_ends(self, key: PartitionKey) -> Mapping[int, LogEnd]:
        """Log ends of brokers that have not registered again since they told them."""
        brokers = self._image.brokers
        return {
            broker_id: log_end
            for broker_id, (epoch, log_end) in self._log_ends.get(key, {}).items()
            if broker_id in brokers and brokers[broker_id].broker_epoch == epoch
        }

    def _note_log_ends(self, broker: BrokerState, log_ends: Iterable[m.PartitionLogEnd]) -> list[PartitionKey]:
        noted: dict[PartitionKey, None] = {}
        for end in log_ends:
            key = (end.topic_id, end.partition)
            state = self._image.partition(*key)
            if state is not None and state.leader == NO_LEADER and broker.broker_id in state.replicas:
                answers = self._log_ends.setdefault(key, {})
                answers[broker.broker_id] = (broker.broker_epoch, LogEnd(end.last_epoch, end.log_end_offset))
                noted[key] = None
        return list(noted)

    def _wanted_log_ends(self, broker: BrokerState) -> list[m.TopicIdPartition]:
        wanted: list[m.TopicIdPartition] = []
        for key in self._leaderless_of(broker.broker_id):
            topic = self._image.topics[key[0]]
            answer = self._log_ends.get(key, {}).get(broker.broker_id)
            if answer is not None and answer[0] == broker.broker_epoch:
                continue
            allowed = self._allows_unclean(key, topic.name)
            if elections.wants_log_end(topic.partitions[key[1]], broker.broker_id, unclean_allowed=allowed):
                wanted.append(m.TopicIdPartition(*key))
                if len(wanted) == WANTED_LOG_ENDS_MAX:
                    break
        return wanted

    def _leaderless_of(self, broker_id: int) -> list[PartitionKey]:
        own = self._image.partitions_of_broker(broker_id)
        return [key for key in self._image.leaderless if key in own]

    def _can_lead_with(self, broker_id: int, can_lead: bool) -> CanLead:
        return lambda candidate: can_lead if candidate == broker_id else self._image.can_lead(candidate)

    def _can_lead_without(self, gone: Collection[int]) -> CanLead:
        return lambda candidate: candidate not in gone and self._image.can_lead(candidate)


def _registration_fault(request: m.BrokerRegistrationRequest) -> str | None:
    """What keeps a registration from being written down; None for nothing."""
    if not 0 <= request.broker_id <= _INT32_MAX or len(request.incarnation_id) != _ID_BYTES or not request.listeners:
        return "a registration has a broker id, an incarnation id and listeners"
    for what, values, count_max in (
        ("listeners", request.listeners, LISTENERS_MAX),
        ("features", request.features, FEATURES_MAX),
        ("log folders", request.log_dirs, LOG_DIRS_MAX),
    ):
        if len(values) > count_max:
            return f"a registration has at most {count_max} {what}"
    if any(len(directory) != _ID_BYTES for directory in request.log_dirs):
        return "a log folder's id has 16 bytes"
    if request.rack is not None and not is_name(request.rack):
        return f"a rack has at most {NAME_LENGTH_MAX} characters, none of them null"
    return _listeners_fault(request) or _features_fault(request)


def _listeners_fault(request: m.BrokerRegistrationRequest) -> str | None:
    names = [listener.name for listener in request.listeners]
    if not all(is_name(listener.name) and is_name(listener.host) for listener in request.listeners):
        return f"a listener's name and host have at most {NAME_LENGTH_MAX} characters, none of them null"
    if len(set(names)) != len(names):
        return "two listeners have the same name"
    if any(not 0 <= listener.port <= _UINT16_MAX for listener in request.listeners):
        return "a listener's port is not between 0 and 65535"
    if any(not 0 <= listener.security_protocol <= _INT16_MAX for listener in request.listeners):
        return f"a listener's security protocol is not between 0 and {_INT16_MAX}"
    return None


def _features_fault(request: m.BrokerRegistrationRequest) -> str | None:
    if not all(is_name(feature.name) for feature in request.features):
        return f"a feature's name has at most {NAME_LENGTH_MAX} characters, none of them null"
    for feature in request.features:
        if not 0 <= feature.min_supported_version <= feature.max_supported_version <= _INT16_MAX:
            return f"the versions of feature {feature.name!r} are not a range between 0 and {_INT16_MAX}"
    return None
