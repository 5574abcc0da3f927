"""The owner alone, over a log that is a list: which errors are one operation's, and which are the node's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision
from kipmesh.node.controller.owner import Owner


class ListLog:
    """A log whose appends can fail before or after they are done."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.fail_before: Exception | None = None
        self.fail_after: Exception | None = None
        self.fail_told: Exception | None = None
        self.healthy = True
        self.failures: list[BaseException] = []
        self.owner = Owner(
            append=self.append,
            flush=lambda: None,
            end_offset=lambda: len(self.records),
            on_high_watermark=self.told,
            on_failure=self.failures.append,
            is_log_healthy=lambda: self.healthy,
        )

    def append(self, records: Sequence[Any]) -> None:
        if self.fail_before is not None:
            raise self.fail_before
        self.records += records
        if self.fail_after is not None:
            raise self.fail_after

    def told(self, _high_watermark: int) -> None:
        if self.fail_told is not None:
            raise self.fail_told

    async def do(self, record: str = "record") -> Any:
        return await asyncio.wait_for(self.owner.do(lambda: Decision([record], record)), 5)


async def test_an_error_that_left_nothing_is_one_operations() -> None:
    log = ListLog()
    log.owner.start()
    log.fail_before = ValueError("cannot be encoded")
    with pytest.raises(KafkaError) as caught:
        await log.do()
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    assert log.owner.is_active
    assert not log.failures

    def broken() -> Decision[None]:
        raise ZeroDivisionError

    with pytest.raises(KafkaError) as caught:
        await log.owner.do(broken)
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    log.fail_before = None
    assert await log.do("next") == "next"
    await log.owner.stop(1)


@pytest.mark.parametrize("how", ["broken log", "half done", "not told"])
async def test_an_error_that_may_have_left_something_ends_the_node(how: str) -> None:
    log = ListLog()
    log.owner.start()
    error = ValueError("bug")
    if how == "broken log":
        log.fail_before, log.healthy = error, False
    elif how == "half done":
        log.fail_after = error
    else:
        log.fail_told = error
    with pytest.raises(KafkaError):
        await log.do()
    assert log.failures == [error]
    assert not log.owner.is_active
    with pytest.raises(KafkaError) as caught:
        await log.do()
    assert caught.value.code is ErrorCode.NOT_CONTROLLER
    await log.owner.stop(1)
