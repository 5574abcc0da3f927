"""A client that was not closed emits a ResourceWarning with its client id."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.core.errors import KafkaError
from kipmesh.testing.fake_broker import FakeCluster


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_unclosed_client_emits_resource_warning(kind: Any) -> None:
    async def use(*, closes: bool) -> None:
        async with FakeCluster() as cluster:
            client = kind(cluster.bootstrap, **{"client.id": "forgotten"})
            await client.start()
            if closes:
                await client.close()

    def run(*, closes: bool) -> None:
        asyncio.run(use(closes=closes))
        gc.collect()

    run(closes=True)  # warnings are errors here
    with pytest.warns(ResourceWarning, match="forgotten was not closed: use `async with` or close"):
        run(closes=False)


async def test_client_that_never_started_does_not_warn() -> None:
    Consumer("127.0.0.1:1")
    failed = AdminClient("127.0.0.1:1", **{"request.timeout.ms": 100})
    with pytest.raises(KafkaError):
        await failed.start()
    del failed
    gc.collect()
