"""Driver of kafka-python 3.x."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import kafka
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import BrokerResponseError, KafkaError, OffsetOutOfRangeError, UnknownBrokerIdError, for_code
from kafka.structs import TopicPartition

from tests.clients.drivers.serving import BEGINNING, END, VerbError, data, headers_of, record, serve

_CODES = {for_code(code).__name__: code for code in range(-1, 130)}


def _of_record(found: Any) -> dict[str, Any]:
    return record(found.partition, found.offset, found.key, found.value, found.timestamp, found.headers)


def _check(result: str) -> None:
    if result != "OK":
        raise VerbError(_CODES.get(result, -1), result)


class Driver:
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        self._common = {"bootstrap_servers": bootstrap.split(","), "request_timeout_ms": 15_000}
        self._rack = options.get("rack") or ""
        self._admin_client: Any = None
        self._group: Any = None

    @property
    def _admin(self) -> Any:
        if self._admin_client is None:
            self._admin_client = kafka.KafkaAdminClient(**self._common)
        return self._admin_client

    def _with_controller(self, send: Callable[[Any], Any]) -> Any:
        """Send a request to the controller; retry with a new admin client if this one lacks the controller's address.

        The admin client caches controller and brokers and never recovers if they do not match.
        """
        try:
            return send(self._admin)
        except UnknownBrokerIdError:
            self._admin_client.close()
            self._admin_client = None
            return send(self._admin)

    def hello(self) -> dict[str, Any]:
        return {"client": "kafka-python", "version": kafka.__version__}

    def create_topic(self, topic: str, partitions: int, replicas: int, config: dict[str, str] | None = None) -> None:
        wanted = {"num_partitions": partitions, "replication_factor": replicas, "configs": config or {}}
        self._with_controller(lambda admin: admin.create_topics({topic: wanted}, timeout_ms=15_000))

    def delete_topic(self, topic: str) -> None:
        self._with_controller(lambda admin: admin.delete_topics([topic], timeout_ms=15_000))

    def list_topics(self) -> list[str]:
        return sorted(self._admin.list_topics())

    def describe_topic(self, topic: str) -> list[dict[str, Any]]:
        (found,) = self._admin.describe_topics([topic])
        if found["error_code"]:
            raise VerbError(found["error_code"], topic)
        return [
            {
                "id": each["partition_index"],
                "leader": each["leader_id"],
                "replicas": each["replica_nodes"],
                "isr": each["isr_nodes"],
            }
            for each in found["partitions"]
        ]

    def describe_cluster(self) -> dict[str, Any]:
        found = self._admin.describe_cluster()
        keys = {"id": ("broker_id", "node_id"), "host": ("host",), "port": ("port",), "rack": ("rack",)}
        brokers = [
            {key: next(broker[name] for name in names if name in broker) for key, names in keys.items()}
            for broker in found["brokers"]
        ]
        return {"brokers": brokers, "controller": found["controller_id"]}

    def create_partitions(self, topic: str, total: int) -> None:
        self._with_controller(lambda admin: admin.create_partitions({topic: total}, timeout_ms=15_000))

    def describe_configs(self, topic: str) -> dict[str, str]:
        found = self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
        return {name: each["value"] for name, each in found["topic"][topic].items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        wanted = ConfigResource(ConfigResourceType.TOPIC, topic, configs={name: value})
        result = self._admin.alter_configs([wanted], incremental=True)["topic"][topic]
        if result != "OK":  # "[Error 40] InvalidConfigurationError: ..."
            raise VerbError(int(result.removeprefix("[Error ").partition("]")[0]), result)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        (found,) = self._admin.delete_records({TopicPartition(topic, partition): before}).values()
        return int(found["low_watermark"])

    def produce(
        self,
        topic: str,
        records: list[dict[str, Any]],
        compression: str = "none",
        acks: str = "all",
        idempotent: bool = False,
        pace_ms: float = 0,
    ) -> list[list[int]]:
        producer = kafka.KafkaProducer(
            **self._common,
            compression_type=None if compression == "none" else compression,
            acks="all" if acks == "all" else int(acks),
            enable_idempotence=idempotent,
            linger_ms=2,
            max_block_ms=30_000,
            max_request_size=1 << 20,
        )
        try:
            pending = []
            for each in records:
                pending.append(
                    producer.send(
                        topic,
                        data(each["value"]),
                        data(each.get("key")),
                        headers=headers_of(each),
                        partition=each.get("partition"),
                        timestamp_ms=each.get("timestamp"),
                    )
                )
                time.sleep(pace_ms / 1000)
            producer.flush(60)
            acknowledged = [delivery.get(60) for delivery in pending]
            return [[each.partition, each.offset] for each in acknowledged]
        finally:
            producer.close(timeout=10)

    def _consumer(self, group: str | None, reset: str) -> Any:
        return kafka.KafkaConsumer(
            **self._common,
            group_id=group,
            auto_offset_reset=reset,
            enable_auto_commit=False,
            client_rack=self._rack,
            fetch_max_wait_ms=100,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1000,
        )

    def consume(
        self, topic: str, partitions: dict[str, int], count: int, timeout_s: float = 30, reset: str = "earliest"
    ) -> list[dict[str, Any]]:
        consumer = self._consumer(None, reset)
        try:
            consumer.assign([TopicPartition(topic, int(number)) for number in partitions])
            for number, offset in partitions.items():
                topic_partition = TopicPartition(topic, int(number))
                if offset == BEGINNING:
                    consumer.seek_to_beginning(topic_partition)
                elif offset == END:
                    consumer.seek_to_end(topic_partition)
                else:
                    consumer.seek(topic_partition, offset)
            return self._read(consumer, count, timeout_s)
        finally:
            consumer.close()

    def _read(self, consumer: Any, count: int, timeout_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            for records in consumer.poll(1000, max_records=count - len(found)).values():
                found += [_of_record(each) for each in records]
        return found

    def watermarks(self, topic: str, partition: int) -> list[int]:
        consumer, topic_partition = self._consumer(None, "earliest"), TopicPartition(topic, partition)
        try:
            return [
                consumer.beginning_offsets([topic_partition])[topic_partition],
                consumer.end_offsets([topic_partition])[topic_partition],
            ]
        finally:
            consumer.close()

    def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        consumer, topic_partition = self._consumer(None, "earliest"), TopicPartition(topic, partition)
        try:
            found = consumer.offsets_for_times({topic_partition: timestamp})[topic_partition]
            return END if found is None else found.offset
        finally:
            consumer.close()

    def group_open(self, group: str, topics: list[str]) -> None:
        self._group = self._consumer(group, "earliest")
        self._group.subscribe(topics)

    def group_poll(self, count: int, timeout_s: float) -> dict[str, Any]:
        records = self._read(self._group, count, timeout_s)
        return {"records": records, "assigned": sorted(each.partition for each in self._group.assignment())}

    def group_commit(self) -> None:
        self._group.commit()

    def group_close(self) -> None:
        group, self._group = self._group, None
        group.close(autocommit=False)

    def committed(self, group: str, topic: str, partition: int) -> int:
        topic_partition = TopicPartition(topic, partition)
        found = self._admin.list_group_offsets({group: [topic_partition]})[group]
        return found[topic_partition].offset if topic_partition in found else -1

    def list_groups(self) -> list[str]:
        return sorted(each["group_id"] for each in self._admin.list_groups())

    def describe_group(self, group: str) -> dict[str, Any]:
        found = self._admin.describe_groups([group])[group]
        return {"state": found["group_state"].upper(), "members": len(found["members"])}

    def delete_group(self, group: str) -> None:
        (result,) = self._admin.delete_groups([group]).values()
        _check(result)

    def close(self) -> None:
        for client in (self._group, self._admin_client):
            if client is not None:
                client.close()


def code_of(error: BaseException) -> int | None:
    """Return the code of broker errors. The consumer raises an OFFSET_OUT_OF_RANGE error without a code."""
    if isinstance(error, BrokerResponseError):
        return int(error.errno)
    if isinstance(error, KafkaError):
        return OffsetOutOfRangeError.errno if "OffsetOutOfRange" in repr(error) else -1
    return None


if __name__ == "__main__":
    serve(Driver, code_of)
