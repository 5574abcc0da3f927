"""Lifecycle of brokers: registration, heartbeats, fencing and controlled shutdown, and the elections that follow.

| state                  | event                                      | effect                                       |
| ---------------------- | ------------------------------------------ | -------------------------------------------- |
| any                    | registers, another incarnation is alive    | DUPLICATE_BROKER_REGISTRATION                |
| any                    | registers after an unclean stop            | fenced; leaves all ISRs and leaderships      |
| any                    | registers after a clean stop               | fenced; as after an expired session          |
| any                    | registers without a former log directory   | fenced; all its replicas are lost            |
| fenced                 | heartbeat, has applied its registration    | unfenced; leads where only it was missing    |
| unfenced               | session expires                            | fenced; leaves ISRs except as last member    |
| unfenced               | heartbeat requests shutdown                | shutting down; leaves ISRs in the same way   |
| shutting down          | heartbeat, all others have applied that    | fenced; may stop                             |

Fencing and shutdown are one record each (`fencing`); other changes are one record per partition. A broker epoch is the
offset of the registration record. Sessions and reported log ends are in memory only; everything else follows from the
image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata import elections, fencing, partitions
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.decision import NAME_RULE, CanLead, ControllerState, Decision, error_text, is_name
from kipmesh.core.metadata.elections import LogEnd
from kipmesh.core.metadata.image import BrokerState, MetadataDelta, PartitionKey, common
from kipmesh.core.metadata.sessions import Session
from kipmesh.messages.schema import MAX_INT32

BROKERS_MAX = 10_000
WANTED_LOG_ENDS_MAX = 10_000
"""Maximum partitions in one heartbeat response's request for log ends; later responses request the rest."""
PROVEN_RECORDS_MAX = 100
"""Maximum partition records that one heartbeat causes when it proves its broker alive."""

LISTENERS_MAX = 64
FEATURES_MAX = 256
LOG_DIRS_MAX = 1000
_ID_BYTES = 16
_INT16_MAX = 2**15 - 1
_UINT16_MAX = 2**16 - 1


class BrokerLifecycle:
    """Decisions about brokers: registration, heartbeats, fencing and the elections that follow. The owner appends the
    returned records and applies them to the image."""

    def __init__(self, controller: ControllerState) -> None:
        self._controller = controller
        self._image = controller.image
        self._sessions = controller.sessions
        self._voters = frozenset(voter.id for voter in controller.config.voters)
        # Reported log ends of leaderless partitions: key -> broker -> (broker epoch at the report, log end).
        self._log_ends: dict[PartitionKey, dict[int, tuple[int, LogEnd]]] = {}
        # Leaderless partitions with a requested unclean election, whatever their topic's configuration.
        self._unclean_requested: dict[PartitionKey, None] = {}

    def forget_decided(self, delta: MetadataDelta) -> None:
        """Drop the reported log ends and requested unclean elections of partitions in `delta` that now have a leader or
        were deleted."""
        for kept in (self._log_ends, self._unclean_requested):
            for key in common(kept.keys(), delta.changed_partitions):
                state = self._image.partition(*key)
                if state is None or state.leader != r.NO_LEADER:
                    kept.pop(key, None)
            for topic in delta.deleted_topics if kept else ():
                for partition in topic.partitions:
                    kept.pop((topic.topic_id, partition), None)

    # --- registration

    def register(
        self, request: m.BrokerRegistrationRequest, now_ms: int, next_offset: int
    ) -> Decision[m.BrokerRegistrationResponse]:
        """Decide BrokerRegistration. The first returned record must get the offset `next_offset`, the new broker epoch.

        A broker that registers again with the same incarnation id keeps its epoch. Error codes, without records:
        INCONSISTENT_CLUSTER_ID; INVALID_REQUEST (malformed, or the id of a controller); POLICY_VIOLATION (BROKERS_MAX
        brokers exist); DUPLICATE_BROKER_REGISTRATION (another incarnation has a live session).
        """
        existing = self._image.brokers.get(request.broker_id)
        code, message = self._registration_error(request, existing, now_ms)
        if code is not ErrorCode.NONE:
            return Decision((), m.BrokerRegistrationResponse(error_code=code, error_message=message))
        before = existing if existing is not None and existing.incarnation_id == request.incarnation_id else None
        epoch = next_offset if before is None else before.broker_epoch
        record = r.RegisterBrokerRecord(
            broker_id=request.broker_id,
            incarnation_id=request.incarnation_id,
            broker_epoch=epoch,
            end_points=tuple([r.BrokerEndpoint(**listener._asdict()) for listener in request.listeners]),
            features=tuple([r.BrokerFeature(**feature._asdict()) for feature in request.features]),
            rack=request.rack,
            fenced=before is None or before.fenced,
            in_controlled_shutdown=before is not None and before.in_controlled_shutdown,
            log_dirs=tuple(request.log_dirs),
        )
        records: list[r.Record] = [record]
        if before is None:
            clean = existing is not None and request.previous_broker_epoch == existing.broker_epoch
            if partitions.has_lost_directories(existing, request.log_dirs):
                can_lead = self._can_lead_without((request.broker_id,))
                records += partitions.mark_all_lost(self._image, request.broker_id, can_lead)
            else:
                records += self._leave_records((request.broker_id,), unclean=not clean)
        self._sessions.touch(request.broker_id, epoch, now_ms)
        return Decision(records, m.BrokerRegistrationResponse(broker_epoch=epoch))

    def _registration_error(
        self, request: m.BrokerRegistrationRequest, existing: BrokerState | None, now_ms: int
    ) -> tuple[ErrorCode, str | None]:
        cluster_id = self._controller.config.cluster_id
        if request.cluster_id != cluster_id:
            text = f"this is cluster {cluster_id!r}, but the broker has cluster.id {request.cluster_id!r}"
            return ErrorCode.INCONSISTENT_CLUSTER_ID, error_text(text)
        fault = _registration_fault(request)
        if fault is not None:
            return ErrorCode.INVALID_REQUEST, fault
        if request.broker_id in self._voters:
            return ErrorCode.INVALID_REQUEST, (
                f"node.id {request.broker_id} is a controller's (controller.quorum.voters); give the broker another"
            )
        if existing is None:
            if len(self._image.brokers) >= BROKERS_MAX:
                return ErrorCode.POLICY_VIOLATION, f"the cluster has the maximum of {BROKERS_MAX} brokers"
        elif existing.incarnation_id != request.incarnation_id and self._sessions.is_live(request.broker_id, now_ms):
            return ErrorCode.DUPLICATE_BROKER_REGISTRATION, (
                f"broker {request.broker_id} is registered by another process, which sent a heartbeat within the last "
                f"{self._sessions.timeout_ms} ms"
            )
        return ErrorCode.NONE, None

    # --- heartbeats

    def heartbeat(
        self, request: m.BrokerHeartbeatRequest, now_ms: int, next_offset: int, connection: int = 0
    ) -> Decision[m.BrokerHeartbeatResponse]:
        """Decide BrokerHeartbeat: unfence, fence or shut down the broker, and elect leaders where this makes it
        possible.

        `next_offset` is the offset of the next record. `connection` is the id of the connection that carried the
        heartbeat, or 0 if its end is not reported to `disconnected`. Error codes, without records:
        BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH.
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
        records: list[r.Record] = []
        if request.want_shut_down:
            records, should_stop = self._shut_down(broker, session, next_offset)
            fenced = fenced or should_stop
        elif broker.fenced:
            if caught_up and not request.want_fence:
                records, fenced = self._unfence(broker), False
        elif request.want_fence and now_ms - session.since_ms >= self._sessions.timeout_ms:
            # Before the timeout, the broker may only have missed the change of controllers (ADR 7).
            records, fenced = self.fence([broker.broker_id]), True
        else:
            records = self._prove(broker, request.current_metadata_offset)
        records += partitions.directories_failed(broker, request.offline_log_dirs)
        reported = self._not_changed_by(self._note_log_ends(broker, request.log_ends), records)
        can_lead = self._can_lead_with(broker.broker_id, not fenced and not request.want_shut_down)
        records += self._elect_by_log_end(reported, can_lead)
        response = m.BrokerHeartbeatResponse(
            is_caught_up=caught_up,
            is_fenced=fenced,
            should_shut_down=should_stop,
            wanted_log_ends=self._wanted_log_ends(broker) if caught_up and not should_stop else (),
        )
        return Decision(records, response)

    def _unfence(self, broker: BrokerState) -> list[r.Record]:
        records: list[r.Record] = [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=-1)]
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

    def _prove(self, broker: BrokerState, metadata_offset: int) -> list[r.Record]:
        """Return the records that clear `last_known_elr` of partitions that the broker leads, because it has applied
        the metadata up to `metadata_offset`.

        Empty if there are none to clear. Normally, one event clears them all. If the broker lags behind the newest
        change, up to PROVEN_RECORDS_MAX partition records are returned, so that constant changes cannot delay the proof
        forever.
        """
        unproven = self._image.unproven(broker.broker_id)
        if not unproven:
            return []
        if self._is_event and max(unproven.values()) <= metadata_offset:
            return [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, proven=True)]
        records = [elections.clear_last_known_elr(key) for key, offset in unproven.items() if offset <= metadata_offset]
        return records[:PROVEN_RECORDS_MAX] if self._is_event else records

    def _not_changed_by(self, keys: Iterable[PartitionKey], records: Collection[r.Record]) -> list[PartitionKey]:
        """Return the partitions that none of the records changes, directly or by a fencing event."""
        changed = {
            (record.topic_id, record.partition_id) for record in records if isinstance(record, r.PartitionChangeRecord)
        }
        kept = [key for key in keys if key not in changed]
        for record in records:
            if fencing.removes_broker(self._image.fencing_level, record):
                can_lead = fencing.successors(self._image.brokers, record)
                states = [self._image.topics[topic_id].partitions[partition] for topic_id, partition in kept]
                implied = fencing.without_broker(states, record.broker_id, can_lead)
                kept = [key for key, after in zip(kept, implied, strict=True) if after is None]
        return kept

    def _shut_down(self, broker: BrokerState, session: Session, next_offset: int) -> tuple[list[r.Record], bool]:
        """Return the records of a controlled shutdown, and whether the broker may stop, because all other brokers have
        applied its removal."""
        if broker.fenced:
            self._sessions.end(broker.broker_id)
            return [], True
        is_first = not broker.in_controlled_shutdown
        # Level 0: one record per partition precedes the shutdown record.
        records = self._leave_records((broker.broker_id,), unclean=False) if is_first and not self._is_event else []
        if is_first:
            session.shutdown_offset = next_offset + len(records)
        elif session.shutdown_offset is None:  # the shutdown began under another controller
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
                r.BrokerRegistrationChangeRecord(
                    broker.broker_id, broker.broker_epoch, fenced=1 if should_stop else 0, in_controlled_shutdown=1
                )
            )
        if should_stop:
            self._sessions.end(broker.broker_id)
        return records, should_stop

    # --- fencing

    def disconnected(self, broker_id: int, connection: int, now_ms: int) -> bool:
        """Record the end of a connection that carried heartbeats. Return whether that starts the loss timeout of an
        unfenced broker.

        False if the broker is fenced or already missing, has another such connection, or the loss timeout is 0
        (disabled).
        """
        return self._sessions.disconnected(broker_id, connection, now_ms) and self._is_unfenced(broker_id)

    def unconfirmed(self) -> dict[int, Collection[tuple[str, int]]]:
        """Return broker id -> (host, port) of its listeners, for unfenced brokers that have not contacted this
        controller yet."""
        brokers = filter(self._is_unfenced, self._sessions.unconfirmed())
        return {broker_id: self._image.brokers[broker_id].endpoints.values() for broker_id in brokers}

    def refused(self, broker_id: int, now_ms: int) -> bool:
        """Record that the broker's address refuses connections. Return whether that starts the loss timeout of an
        unfenced broker.

        False if the broker is fenced or already missing, has contacted this controller, or the loss timeout is 0
        (disabled).
        """
        return self._is_unfenced(broker_id) and self._sessions.refused(broker_id, now_ms)

    def _is_unfenced(self, broker_id: int) -> bool:
        broker = self._image.brokers.get(broker_id)
        return broker is not None and not broker.fenced

    def expired(self, now_ms: int) -> list[int]:
        """Return the ids of unfenced brokers whose sessions have expired, earliest expiry first.

        Each of them gets a new session, and is returned again if the new session expires. Expired sessions of other
        brokers are removed.
        """
        expired = []
        for broker_id in self._sessions.expired(now_ms):
            if self._is_unfenced(broker_id):
                self._sessions.grant(broker_id, self._image.brokers[broker_id].broker_epoch, now_ms)
                expired.append(broker_id)
            else:
                self._sessions.end(broker_id)
        return expired

    def fence(self, broker_ids: Sequence[int]) -> list[r.Record]:
        """Return the records that fence the first of `broker_ids`, which must be registered.

        With level 1 of `kipmesh.fencing` (630-16) this is one event, with level 0 also one record per changed
        partition. The other brokers, which the caller fences next, are not elected in its place (at level 1, this holds
        only for the next ALSO_GONE_MAX of them).
        """
        broker = self._image.brokers[broker_ids[0]]
        event = r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=1)
        if self._is_event:
            return [event._replace(also_gone=tuple(broker_ids[1 : fencing.ALSO_GONE_MAX + 1]))]
        return [event, *self._leave_records(broker_ids, unclean=False)]

    @property
    def _is_event(self) -> bool:
        """Whether one record implies the changes of a broker's partitions: `kipmesh.fencing` has level 1."""
        return self._image.fencing_level > 0

    def _leave_records(self, excluded: Collection[int], *, unclean: bool) -> list[r.Record]:
        """Return the changes that remove the first of `excluded` from ISRs and leaderships. None of `excluded` is
        elected. With `unclean`, the broker is removed from an ISR even if it is the last member."""
        broker_id = next(iter(excluded))
        can_lead = self._can_lead_without(excluded)
        topics = self._image.topics
        changes = [
            elections.leave_isr(key, topics[key[0]].partitions[key[1]], broker_id, can_lead, unclean=unclean)
            for key in self._image.partitions_of_broker(broker_id)
        ]
        return [change for change in changes if change is not None]

    # --- elections

    def elect_pending(self) -> list[r.Record]:
        """Return the records that elect leaders from the known log ends, after a configuration changed or a broker was
        fenced."""
        return self._elect_by_log_end(list(self._log_ends), self._image.can_lead)

    def elect_unclean(self, keys: Sequence[PartitionKey]) -> list[r.Record]:
        """Return the records that elect leaders of these existing, leaderless partitions if all available replicas have
        reported log ends.

        For the other partitions, the next heartbeat responses request the log ends, and the election takes place once
        these are reported, unless `cancel_unclean` cancels it.
        """
        self._unclean_requested.update(dict.fromkeys(keys))
        return self._elect_by_log_end(keys, self._image.can_lead)

    def cancel_unclean(self, keys: Iterable[PartitionKey]) -> None:
        """Cancel pending unclean elections of these partitions. Partitions without one are ignored."""
        for key in keys:
            self._unclean_requested.pop(key, None)

    def _allows_unclean(self, key: PartitionKey, topic_name: str) -> bool:
        return key in self._unclean_requested or self._controller.unclean_allowed(topic_name)

    def _elect_by_log_end(self, keys: Iterable[PartitionKey], can_lead: CanLead) -> list[r.Record]:
        records: list[r.Record] = []
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
        """Return broker id -> log end, for the log ends that were reported under the brokers' current epochs."""
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
            if state is not None and state.leader == r.NO_LEADER and broker.broker_id in state.replicas:
                log_end = LogEnd(end.last_epoch, end.log_end_offset)
                self._log_ends.setdefault(key, {})[broker.broker_id] = (broker.broker_epoch, log_end)
                noted[key] = None
        return list(noted)

    def _wanted_log_ends(self, broker: BrokerState) -> list[m.TopicIdPartition]:
        wanted: list[m.TopicIdPartition] = []
        for key in self._leaderless_of(broker.broker_id):
            topic = self._image.topics[key[0]]
            reported = self._log_ends.get(key, {}).get(broker.broker_id)
            if reported is not None and reported[0] == broker.broker_epoch:
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

    def _can_lead_without(self, excluded: Collection[int]) -> CanLead:
        return lambda candidate: candidate not in excluded and self._image.can_lead(candidate)


def _registration_fault(request: m.BrokerRegistrationRequest) -> str | None:
    """Return an error message if the registration is malformed or exceeds a limit, else None."""
    if not 0 <= request.broker_id <= MAX_INT32 or len(request.incarnation_id) != _ID_BYTES or not request.listeners:
        return "a registration needs a broker id, a 16-byte incarnation id and listeners"
    for name, values, count_max in (
        ("listeners", request.listeners, LISTENERS_MAX),
        ("features", request.features, FEATURES_MAX),
        ("log directories", request.log_dirs, LOG_DIRS_MAX),
    ):
        if len(values) > count_max:
            return f"a registration may have at most {count_max} {name}, got {len(values)}"
    if any(len(directory) != _ID_BYTES for directory in request.log_dirs):
        return "the id of a log directory must have 16 bytes"
    if request.rack is not None and not is_name(request.rack):
        return f"a rack must have {NAME_RULE}"
    return _listeners_fault(request) or _features_fault(request)


def _listeners_fault(request: m.BrokerRegistrationRequest) -> str | None:
    names = [listener.name for listener in request.listeners]
    if not all(is_name(listener.name) and is_name(listener.host) for listener in request.listeners):
        return f"a listener's name and host must have {NAME_RULE}"
    if len(set(names)) != len(names):
        return "listener names must be unique"
    if any(not 0 <= listener.port <= _UINT16_MAX for listener in request.listeners):
        return f"a listener's port must be between 0 and {_UINT16_MAX}"
    if any(not 0 <= listener.security_protocol <= _INT16_MAX for listener in request.listeners):
        return f"a listener's security protocol must be between 0 and {_INT16_MAX}"
    return None


def _features_fault(request: m.BrokerRegistrationRequest) -> str | None:
    if not all(is_name(feature.name) for feature in request.features):
        return f"a feature's name must have {NAME_RULE}"
    for feature in request.features:
        if not 0 <= feature.min_supported_version <= feature.max_supported_version <= _INT16_MAX:
            return f"the versions of feature {feature.name!r} must be a range between 0 and {_INT16_MAX}"
    return None
