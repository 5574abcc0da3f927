"""Topics that are made because somebody asks for them (`auto.create.topics.enable`)."""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh.core.errors import ErrorCode
from kipmesh.messages import CreatableTopic, CreateTopicsRequest
from kipmesh.messages.table import CREATE_TOPICS
from kipmesh.node.broker.forwarder import Forwarder
from kipmesh.node.broker.reconcile import Image, Until
from kipmesh.rpc.server import RequestContext

_LATER = frozenset({ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_CONTROLLER})


class AutoTopics:
    """Makes topics with the cluster's defaults; one broker's."""

    def __init__(self, forwarder: Forwarder, image: Image, until: Until) -> None:
        self._forwarder = forwarder
        self._image = image
        self._until = until

    async def create(self, names: Sequence[str], timeout_s: float, context: RequestContext) -> dict[str, int]:
        """Ask the controller, and wait until this broker knows them; the error code of each that it does not know.

        LEADER_NOT_AVAILABLE, which clients repeat, where it may still come about.
        """
        topics = [CreatableTopic(name, -1, -1) for name in names]
        response = await self._forwarder.forward(
            CREATE_TOPICS, CreateTopicsRequest(topics, int(timeout_s * 1000)), context
        )
        codes = {result.name: ErrorCode.of(result.error_code) for result in response.topics}
        made = [name for name, code in codes.items() if code in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)]
        await self._until(lambda: all(self._image().topic_by_name(name) for name in made), timeout_s)
        failed: dict[str, int] = {}
        for name in names:
            code = codes.get(name, ErrorCode.REQUEST_TIMED_OUT)
            if self._image().topic_by_name(name) is None:
                failed[name] = ErrorCode.LEADER_NOT_AVAILABLE if name in made or code in _LATER else code
        return failed
