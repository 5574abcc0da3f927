"""ASGI response that streams records as NDJSON or server-sent events.

Sending a chunk waits until the HTTP client has received enough of the earlier ones; this is the only backpressure. A
disconnect is detected immediately, even while there is nothing to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kipmesh.client import ConsumerRecord
from kipmesh.client.json_form import record_object, to_line
from kipmesh.core.errors import KafkaError
from kipmesh_consumer.models import error_object
from kipmesh_consumer.parameters import StreamFormat
from kipmesh_consumer.streams import End, Stream, Streams

CHUNK_BYTES = 64 << 10

log = structlog.get_logger(__name__)


class RecordResponse(Response):
    """HTTP response that sends the records of a stream in one format, and always closes the stream."""

    def __init__(self, streams: Streams, stream: Stream, form: StreamFormat) -> None:
        super().__init__(status_code=200, media_type=form.value)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        self._streams = streams
        self._stream = stream
        self._is_sse = form is StreamFormat.SSE
        self._write_timeout_s = streams.config.stream_write_timeout_ms / 1000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends, fails, stalls or the HTTP client disconnects; then close the stream."""
        sender = asyncio.create_task(self._send_all(send))
        watcher = asyncio.create_task(_until_disconnected(receive))
        end = End.READER_GONE
        try:
            await asyncio.wait([sender, watcher], return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                end = sender.result()
        except OSError:
            pass  # the client disconnected between two chunks
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            await self._stream.close(end)

    async def _send_all(self, send: Send) -> End:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        stream = self._stream
        try:
            async with aclosing(stream.batches()) as batches:
                async for records in batches:
                    if not records and self._is_sse:
                        await self._send(send, b": keep-alive\n\n")
                    for sent, chunk in self._chunks(records):
                        await self._send(send, chunk)
                        stream.mark_delivered(sent)
            if self._is_sse:
                await self._send(send, f'event: end\ndata: {{"reason":"{stream.end}"}}\n\n'.encode())
        except TimeoutError:
            return End.READER_STALLED  # without a last chunk, the client sees that the response is incomplete
        except KafkaError as error:
            log.warning("stream failed", topic=stream.request.topic, error=str(error))
            line = to_line(error_object(error))
            text = f"event: error\ndata: {line}\n\n" if self._is_sse else line + "\n"
            stream.end = End.ERROR
            await self._send(send, text.encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return stream.end or End.ERROR

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._streams.metrics.bytes_delivered.inc(len(chunk))

    def _chunks(self, records: Sequence[ConsumerRecord]) -> Iterator[tuple[Sequence[ConsumerRecord], bytes]]:
        """Encode records; yield chunks of about CHUNK_BYTES as (records of the chunk, bytes)."""
        lines: list[str] = []
        begin = size = 0
        for index, record in enumerate(records):
            line = to_line(record_object(record))
            lines.append(f"data: {line}\n\n" if self._is_sse else line + "\n")
            size += len(line)
            if size >= CHUNK_BYTES or index + 1 == len(records):
                sent = records[begin : index + 1]
                if self._is_sse:
                    lines[-1] = f"id: {self._event_id(sent)}\n{lines[-1]}"
                yield sent, "".join(lines).encode()
                lines, begin, size = [], index + 1, 0

    def _event_id(self, sent: Sequence[ConsumerRecord]) -> str:
        """Return the stream's positions after these records, such as `0:100,1:50`. Last-Event-ID resumes there."""
        after = {**self._stream.positions, **{record.partition: record.offset + 1 for record in sent}}
        return ",".join(f"{partition}:{offset}" for partition, offset in sorted(after.items()))


async def _until_disconnected(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
