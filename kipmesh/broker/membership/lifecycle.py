"""A broker's life as the controller sees it: registration, heartbeats, controlled shutdown.

An unclean stop is told by `previous_broker_epoch` -1: the broker then leaves every ISR and leadership before it is
unfenced. Heartbeats go over a stream that lasts, so that the controller sees it break when this process dies; one that
breaks although the process lives is opened again at once. A heartbeat may be answered with partitions whose log ends
the controller needs to elect a leader ("Log truth"); the next one, sent at once, brings them.

A broker that is isolated asks to be fenced (ADR 7): its heartbeats may arrive although no answer does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.replication.isolation import Isolation
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import LEADER_ROLE_FEATURE
from kipmesh.messages.table import BROKER_HEARTBEAT, BROKER_REGISTRATION
from kipmesh.storage.data_directory import DataDirectories
from kipmesh.transport.grpc.client import TransportError

log = structlog.get_logger(__name__)

REGISTRATION_BACKOFF_S = 0.1
HEARTBEAT_BACKOFF_S = 0.02
"""After a heartbeat without an answer: much less than `broker.connection.loss.timeout.ms`."""
SHUTDOWN_INTERVAL_S = 0.1
# Refusals that waiting does not cure.
_FATAL = frozenset({ErrorCode.INCONSISTENT_CLUSTER_ID, ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED_VERSION})


@dataclass(eq=False)
class BrokerLifecycle:
    """Registers, then beats; `broker_epoch` is -1 until registered.

    `offline_log_dirs` gives the ids of data folders that failed, once the controller knows what was lost.
    """

    config: BrokerConfig
    channel: ControllerChannel
    isolation: Isolation
    _: KW_ONLY
    incarnation_id: bytes
    is_leader_role: bool
    previous_broker_epoch: int
    metadata_offset: Callable[[], int]
    log_ends: Callable[[Sequence[m.TopicIdPartition]], list[m.PartitionLogEnd]]
    folders: DataDirectories | None = None
    offline_log_dirs: Callable[[], Sequence[bytes]] = tuple

    def __post_init__(self) -> None:
        self.isolation.on_change = self._isolation_changed
        self._call: asyncio.Timeout | None = None  # of the heartbeat that is under way
        self._wanted: Sequence[m.TopicIdPartition] = ()
        self._wake = asyncio.Event()
        self.beat_now = self._wake.set
        """Sends the next heartbeat at once: another data directory is offline, say."""
        self._want_shut_down = False
        self._may_stop = asyncio.Event()
        self.broker_epoch = -1
        self.is_fenced = True

    async def register(self, listeners: Sequence[m.Listener]) -> None:
        """Until the controller accepts; raises KafkaError when it never will."""
        folders = self.folders.for_partitions if self.folders is not None else ()
        request = m.BrokerRegistrationRequest(
            broker_id=self.config.node_id,
            cluster_id=self.config.cluster_id,
            incarnation_id=self.incarnation_id,
            listeners=listeners,
            features=[m.Feature(LEADER_ROLE_FEATURE, 0, 1)] if self.is_leader_role else (),
            rack=self.config.broker_rack,
            log_dirs=[folder.directory_id for folder in folders if folder.is_online],
            previous_broker_epoch=self.previous_broker_epoch,
        )
        told = None
        while True:
            sent_ms = self.isolation.now_ms
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
            if reason != told:
                log.warning("registration failed, trying again", error=reason)
                told = reason
            await asyncio.sleep(REGISTRATION_BACKOFF_S)

    @property
    def _timeout_s(self) -> float:
        return self.config.broker_session_timeout_ms / 1000

    async def beat(self) -> None:
        """Heartbeats for ever; raises KafkaError when another incarnation has taken this broker's id."""
        while True:
            self._wake.clear()
            hurried = self._want_shut_down and not self._may_stop.is_set()
            interval_s = SHUTDOWN_INTERVAL_S if hurried else self.config.broker_heartbeat_interval_ms / 1000
            wanted, self._wanted = self._wanted, ()
            is_isolated, sent_ms = self.isolation.is_isolated, self.isolation.now_ms
            request = m.BrokerHeartbeatRequest(
                broker_id=self.config.node_id,
                broker_epoch=self.broker_epoch,
                current_metadata_offset=self.metadata_offset(),
                want_fence=is_isolated,
                want_shut_down=self._want_shut_down,
                log_ends=self.log_ends(wanted) if wanted else (),
                offline_log_dirs=self.offline_log_dirs(),
            )
            try:
                response = await self._exchange(request)
            except TimeoutError:
                continue  # it says what is not so any more
            except TransportError as error:
                log.warning("heartbeat failed", error=str(error))
                interval_s = interval_s if is_isolated else HEARTBEAT_BACKOFF_S
            else:
                self._take(response)
                if not response.error_code:
                    self.isolation.responded(sent_ms)
                    # One that was repeated for long leaves little time for the next.
                    interval_s = 0 if is_isolated else min(interval_s, self.isolation.left_ms / 2000)
                if self._wanted and self.log_ends(self._wanted):
                    continue  # somebody waits for these
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()

    async def _exchange(self, request: m.BrokerHeartbeatRequest) -> m.BrokerHeartbeatResponse:
        """One heartbeat; raises TransportError, and TimeoutError once `want_fence` should be another."""
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
        self._wake.set()

    def _take(self, response: m.BrokerHeartbeatResponse) -> None:
        if response.error_code:
            code = ErrorCode.of(response.error_code)
            if code == ErrorCode.STALE_BROKER_EPOCH:
                raise KafkaError(code, f"broker {self.config.node_id} was registered again by another process")
            if code == ErrorCode.BROKER_ID_NOT_REGISTERED:
                raise KafkaError(code, f"the controller does not know broker {self.config.node_id} any more")
            log.warning("heartbeat refused", error=code.name)
            return
        if response.is_fenced != self.is_fenced:
            log.info("fenced" if response.is_fenced else "unfenced")
        self.is_fenced = response.is_fenced
        self._wanted = response.wanted_log_ends
        if response.should_shut_down:
            self._may_stop.set()

    def metadata_advanced(self) -> None:
        """The metadata cache moved on while fenced: tell the controller now, not at the next beat."""
        if self.is_fenced:
            self._wake.set()

    async def shut_down(self, timeout_s: float) -> None:
        """Ask to hand over leaderships and wait until the controller says so, at most `timeout_s`."""
        self._want_shut_down = True
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._may_stop.wait()
        except TimeoutError:
            log.warning("stopping without the controller's consent", waited_s=timeout_s)
