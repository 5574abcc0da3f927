"""The HTTP API: `/v1/topics`, `/v1/topics/{topic}/records`, `/v1/lag`, probes and metrics. See docs/http-api.md.

Errors are JSON with Kafka's error code. Status: 400 invalid or unknown parameter; 404 unknown topic, partition or path;
405 wrong method; 416 offset out of range; 500 internal error; 503 too many streams or cluster not available; 504
request to the cluster timed out.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from kipmesh.client import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT64
from kipmesh_consumer import models, streams
from kipmesh_consumer.backend import Backend
from kipmesh_consumer.models import error_object, status_of
from kipmesh_consumer.parameters import (
    Edge,
    Start,
    bad_parameter,
    choose_format,
    choose_partitions,
    parse_start,
)
from kipmesh_consumer.response import RecordResponse
from kipmesh_consumer.streams import StreamsExhaustedError

TopicName = Annotated[str, Path(min_length=1, max_length=249, description="Name of the topic")]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": models.Error, "description": "Invalid parameter"},
    404: {"model": models.Error, "description": "Unknown topic or partition"},
    416: {"model": models.Error, "description": "Offset out of range"},
    503: {"model": models.Error, "description": "Too many streams, or the cluster is not available"},
}
_RECORDS_DESCRIPTION = """\
Streams records as NDJSON (one record per line) or server-sent events. Without `follow`, the stream ends at the end
offsets at the time of the request. Fields have Kafka's names in snake case, with `key_b64` and `value_b64` for bytes
that are not UTF-8. The id of an SSE event is a value for `from` that resumes after the event; a client that reconnects
with Last-Event-ID resumes there.
With `from=committed`, the default if the service has a `group.id`, the stream is a member of that group: it shares the
topic's partitions with other members, follows, and commits what it delivered.
An error after the first byte is sent as a last line `{"error": ...}` (SSE: event `error`)."""


def make_app(backend: Backend) -> FastAPI:
    """Create the ASGI application for a backend."""
    app = FastAPI(title="kipmesh consumer", version=version("kipmesh"), description="Kafka records over HTTP.")
    _add_errors(app)
    _add_probes(app, backend)
    _add_records(app, backend)
    _add_views(app, backend)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(KafkaError)
    async def kafka_error(_request: Request, error: KafkaError) -> JSONResponse:
        return JSONResponse(error_object(error), status_of(error))

    @app.exception_handler(StreamsExhaustedError)
    async def exhausted(_request: Request, error: StreamsExhaustedError) -> JSONResponse:
        body = {"error": {"code": -1, "name": "STREAMS_EXHAUSTED", "message": str(error)}}
        return JSONResponse(body, 503, headers={"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] else ""
        return JSONResponse(error_object(KafkaError(ErrorCode.INVALID_REQUEST, f"{name}: {first['msg']}")), 400)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail.lower()}"
        return JSONResponse(
            error_object(KafkaError(ErrorCode.INVALID_REQUEST, text)), error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def failed(_request: Request, _error: Exception) -> JSONResponse:
        text = "internal error; see the log of the service"
        return JSONResponse(error_object(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, text)), 500)


def _refuse_unknown_parameters(request: Request) -> None:
    known = sorted(field.alias for field in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            raise bad_parameter(f"unknown parameter {name!r}; known parameters: {', '.join(known) or 'none'}")


_STRICT = [Depends(_refuse_unknown_parameters)]


def _add_probes(app: FastAPI, backend: Backend) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("alive\n")

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> PlainTextResponse:
        return PlainTextResponse("ready\n") if backend.ready else PlainTextResponse("not ready\n", 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        backend.streams.update_fetch_stats()
        body = await asyncio.to_thread(generate_latest, backend.registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)


def _add_records(app: FastAPI, backend: Backend) -> None:
    @app.get(
        "/v1/topics/{topic}/records",
        dependencies=_STRICT,
        summary="Records of a topic",
        description=_RECORDS_DESCRIPTION,
        response_class=Response,
        responses={
            **_ERRORS,
            200: {"content": {"application/x-ndjson": {}, "text/event-stream": {}}, "description": "Records"},
        },
    )
    async def records(
        topic: TopicName,
        begin: Annotated[
            str | None, Query(alias="from", max_length=200_000, description="earliest, latest, committed, or 0:100,...")
        ] = None,
        partition: Annotated[
            list[int] | None, Query(max_length=10_000, description="Only these partitions; repeatable")
        ] = None,
        limit: Annotated[int | None, Query(ge=1, le=MAX_INT64, description="End after this many records")] = None,
        follow: Annotated[bool | None, Query(description="Continue with new records")] = None,
        timeout_ms: Annotated[
            int | None, Query(ge=1, le=86_400_000, description="End after this time without a record")
        ] = None,
        form: Annotated[str | None, Query(alias="format", description="ndjson or sse; overrides Accept")] = None,
        accept: Annotated[str | None, Header()] = None,
        last_event_id: Annotated[str | None, Header(max_length=200_000)] = None,
    ) -> Response:
        chosen = choose_format(form, accept)
        start = _start(begin, last_event_id, backend.config.group_id)
        is_member = start.edge is Edge.COMMITTED
        if is_member and (partition or follow is False):
            raise bad_parameter("from=committed cannot be combined with partition or follow=false")
        existing = await backend.partitions(topic)
        request = streams.StreamRequest(
            topic=topic,
            partitions=choose_partitions(existing, partition or (), start),
            start=start,
            limit=limit,
            timeout_ms=timeout_ms,
            follow=is_member if follow is None else follow,
        )
        stream = await backend.open_stream(request)
        return RecordResponse(backend.streams, stream, chosen)


def _start(begin: str | None, last_event_id: str | None, group_id: str | None) -> Start:
    """Return where a stream starts. Last-Event-ID takes precedence over `from`, unless the start is `committed`.

    Without `from` the start is `committed` if the service has a `group.id`, else `earliest`. Raises
    KafkaError(INVALID_REQUEST).
    """
    start = parse_start(begin or (Edge.EARLIEST if group_id is None else Edge.COMMITTED))
    if start.edge is Edge.COMMITTED:
        if group_id is None:
            raise bad_parameter("from=committed requires a service with group.id")
        return start
    return parse_start(last_event_id) if last_event_id else start


def _add_views(app: FastAPI, backend: Backend) -> None:
    @app.get("/v1/topics", summary="All topics", dependencies=_STRICT, responses={503: _ERRORS[503]})
    async def topics() -> models.Topics:
        found = await backend.topics()
        return models.Topics(
            topics=[
                models.Topic(
                    name=topic.name,
                    topic_id=base64.urlsafe_b64encode(topic.topic_id).rstrip(b"=").decode(),
                    partitions=sorted(topic.partitions),
                )
                for topic in found
            ]
        )

    @app.get(
        "/v1/lag",
        summary="Lag of this service and its open streams",
        dependencies=_STRICT,
        responses={503: _ERRORS[503]},
    )
    async def lag(
        topic: Annotated[str | None, Query(max_length=249, description="Only this topic")] = None,
    ) -> models.Lag:
        delivered = backend.streams.delivered.of(topic)
        open_streams = [one for one in backend.streams.open.values() if topic in (None, one.request.topic)]
        wanted = {TopicPartition(one.topic, one.partition) for one in delivered}
        for stream in open_streams:
            wanted |= {TopicPartition(stream.request.topic, partition) for partition in stream.positions}
        ends = await backend.end_offsets(sorted(wanted))
        return models.Lag(
            partitions=[
                models.PartitionLag(**_lag(ends, *one))
                for one in delivered
                if TopicPartition(one.topic, one.partition) in ends
            ],
            streams=[
                models.StreamLag(stream_id=stream.stream_id, **_lag(ends, stream.request.topic, partition, position))
                for stream in open_streams
                for partition, position in sorted(stream.positions.items())
                if TopicPartition(stream.request.topic, partition) in ends
            ],
        )


def _lag(ends: Mapping[TopicPartition, int], topic: str, partition: int, position: int) -> dict[str, Any]:
    end_offset = ends[TopicPartition(topic, partition)]
    return {
        "topic": topic,
        "partition": partition,
        "position": position,
        "end_offset": end_offset,
        "lag": max(0, end_offset - position),
    }
