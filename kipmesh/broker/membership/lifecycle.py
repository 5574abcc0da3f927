"""Registration, heartbeats and controlled shutdown of a broker (REP-06, ADR 0007).

`previous_broker_epoch` -1 states an unclean shutdown: the broker then leaves every ISR and leadership before it is
unfenced. Heartbeats use one long-lived stream, so that the controller notices when this process dies; a stream that
breaks is reopened immediately. A heartbeat response may request the log ends of partitions that need a leader. The next
heartbeat has them and is sent immediately.

An isolated broker requests to be fenced, because its heartbeats may arrive although the responses do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import structlog

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.replication.isolation import Isolation
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.states import LEADER_ROLE_FEATURE
from kipmesh.messages.table import BROKER_HEARTBEAT, BROKER_REGISTRATION
from kipmesh.storage.data_directory import DataDirectories
from kipmesh.transport.grpc.client import TransportError

log = structlog.get_logger(__name__)

REGISTRATION_BACKOFF_S = 0.1
HEARTBEAT_BACKOFF_S = 0.02
"""Pause after a heartbeat without a response, much shorter than `broker.connection.loss.timeout.ms`."""
SHUTDOWN_INTERVAL_S = 0.1
# Refusals that a retry does not change.
_FATAL = frozenset({ErrorCode.INCONSISTENT_CLUSTER_ID, ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED_VERSION})


@dataclass(eq=False)
class BrokerLifecycle:
    """Registers the broker, sends heartbeats, and requests the controlled shutdown.

    `broker_epoch` is -1 before the registration, `previous_broker_epoch` is -1 after an unclean shutdown.

    Args: metadata_offset: returns the last published metadata offset; log_ends: returns the log ends of hosted
    partitions; offline_log_dirs: returns the ids of failed directories whose lost replicas were reported;
    heartbeat_due: event that triggers the next heartbeat immediately.
    """

    config: BrokerConfig
    channel: ControllerChannel
    isolation: Isolation
    _: KW_ONLY
    is_leader_role: bool
    metadata_offset: Callable[[], int]
    log_ends: Callable[[Sequence[m.TopicIdPartition]], list[m.PartitionLogEnd]]
    directories: DataDirectories
    offline_log_dirs: Callable[[], Sequence[bytes]] = tuple
    incarnation_id: bytes = field(default_factory=lambda: uuid.uuid4().bytes)
    previous_broker_epoch: int = -1
    heartbeat_due: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.isolation.on_change = self._isolation_changed
        self._call: asyncio.Timeout | None = None
        self._requested_log_ends: Sequence[m.TopicIdPartition] = ()
        self._wants_shutdown = False
        self._shutdown_granted = asyncio.Event()
        self.broker_epoch = -1
        self.is_fenced = True

    async def register(self, listeners: Sequence[m.Listener]) -> None:
        """Register with these listeners, retrying until the controller accepts.

        Raises KafkaError with INCONSISTENT_CLUSTER_ID, INVALID_REQUEST or UNSUPPORTED_VERSION, for which a retry cannot
        succeed.
        """
        request = m.BrokerRegistrationRequest(
            broker_id=self.config.node_id,
            cluster_id=self.config.cluster_id,
            incarnation_id=self.incarnation_id,
            listeners=listeners,
            features=[m.Feature(LEADER_ROLE_FEATURE, 0, 1)] if self.is_leader_role else (),
            rack=self.config.broker_rack,
            log_dirs=[each.directory_id for each in self.directories.for_partitions if each.is_online],
            previous_broker_epoch=self.previous_broker_epoch,
        )
        logged = None
        while True:
            sent_ms = self.isolation.now_ms()
            try:
                response = await self.channel.call(BROKER_REGISTRATION, request, self._timeout_s)
            except TransportError as error:
                reason = str(error)
            else:
                if not response.error_code:
                    self.broker_epoch = response.broker_epoch
                    self.isolation.responded(sent_ms)
                    log.info("registered", broker_epoch=self.broker_epoch, clean=self.previous_broker_epoch >= 0)
                    return
                code = ErrorCode.of(response.error_code)
                reason = f"{code.name}: {response.error_message}"
                if code in _FATAL:
                    raise KafkaError(code, response.error_message or "the controller refused this broker")
            if reason != logged:
                log.warning("registration failed", error=reason)
                logged = reason
            await asyncio.sleep(REGISTRATION_BACKOFF_S)

    @property
    def _timeout_s(self) -> float:
        return self.config.broker_session_timeout_ms / 1000

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled.

        Raises KafkaError: STALE_BROKER_EPOCH if another process registered with this broker id,
        BROKER_ID_NOT_REGISTERED if the broker was unregistered.
        """
        while True:
            self.heartbeat_due.clear()
            is_waiting_to_stop = self._wants_shutdown and not self._shutdown_granted.is_set()
            interval_s = SHUTDOWN_INTERVAL_S if is_waiting_to_stop else self.config.broker_heartbeat_interval_ms / 1000
            requested, self._requested_log_ends = self._requested_log_ends, ()
            is_isolated, sent_ms = self.isolation.is_isolated, self.isolation.now_ms()
            request = m.BrokerHeartbeatRequest(
                broker_id=self.config.node_id,
                broker_epoch=self.broker_epoch,
                current_metadata_offset=self.metadata_offset(),
                want_fence=is_isolated,
                want_shut_down=self._wants_shutdown,
                log_ends=self.log_ends(requested) if requested else (),
                offline_log_dirs=self.offline_log_dirs(),
            )
            try:
                response = await self._exchange(request)
            except TimeoutError:
                continue  # its `want_fence` is outdated
            except TransportError as error:
                log.warning("heartbeat failed", error=str(error))
                interval_s = interval_s if is_isolated else HEARTBEAT_BACKOFF_S
            else:
                self._handle_response(response)
                if not response.error_code:
                    self.isolation.responded(sent_ms)
                    # After a long wait for the response, little of the session timeout is left.
                    interval_s = 0 if is_isolated else min(interval_s, self.isolation.left_ms / 2000)
                if self._requested_log_ends and self.log_ends(self._requested_log_ends):
                    continue  # an election waits for these
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self.heartbeat_due.wait()

    async def _exchange(self, request: m.BrokerHeartbeatRequest) -> m.BrokerHeartbeatResponse:
        """Send one heartbeat. Raises TransportError, or TimeoutError if the isolation changed meanwhile."""
        try:
            async with asyncio.timeout(None) as self._call:
                response: m.BrokerHeartbeatResponse = await self.channel.call(
                    BROKER_HEARTBEAT, request, self._timeout_s, streaming=True
                )
                return response
        finally:
            self._call = None

    def _isolation_changed(self) -> None:
        if self._call is not None and not self._call.expired():
            self._call.reschedule(asyncio.get_running_loop().time())
        self.heartbeat_due.set()

    def _handle_response(self, response: m.BrokerHeartbeatResponse) -> None:
        if response.error_code:
            code = ErrorCode.of(response.error_code)
            if code == ErrorCode.STALE_BROKER_EPOCH:
                raise KafkaError(
                    code,
                    f"another process is registered as broker {self.config.node_id}; stop it, or change node.id here",
                )
            if code == ErrorCode.BROKER_ID_NOT_REGISTERED:
                raise KafkaError(code, f"broker {self.config.node_id} is no longer registered")
            log.warning("heartbeat refused", error=code.name)
            return
        if response.is_fenced and not self.is_fenced:
            log.info("fenced")
        elif self.is_fenced and not response.is_fenced:
            log.info("unfenced")
        self.is_fenced = response.is_fenced
        self._requested_log_ends = response.wanted_log_ends
        if response.should_shut_down:
            self._shutdown_granted.set()

    def metadata_advanced(self) -> None:
        """Send a heartbeat with the new metadata offset immediately if the broker is fenced, else do nothing."""
        if self.is_fenced:
            self.heartbeat_due.set()

    async def shut_down(self, timeout_s: float) -> None:
        """Request a controlled shutdown and wait until the controller has moved the leaderships.

        Returns after at most `timeout_s` seconds; a timeout is only logged.
        """
        self._wants_shutdown = True
        self.heartbeat_due.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._shutdown_granted.wait()
        except TimeoutError:
            log.warning("controlled shutdown timed out", timeout_s=timeout_s)
