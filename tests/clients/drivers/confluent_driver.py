"""Driver of librdkafka by confluent-kafka."""

from __future__ import annotations

import time
from typing import Any

import confluent_kafka as ck
from confluent_kafka import admin as cka

from tests.clients.drivers.serving import VerbError, data, headers_of, record, serve

TIMEOUT_S = 30.0


def _of_message(found: Any) -> dict[str, Any]:
    return record(
        found.partition(), found.offset(), found.key(), found.value(), found.timestamp()[1], found.headers() or []
    )


class Driver:
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        self._common: dict[str, Any] = {"bootstrap.servers": bootstrap, "socket.timeout.ms": 10_000}
        self._rack = options.get("rack")
        self._admin_client: Any = None
        self._group: Any = None

    @property
    def _admin(self) -> Any:
        if self._admin_client is None:
            self._admin_client = cka.AdminClient(self._common)
        return self._admin_client

    def hello(self) -> dict[str, Any]:
        return {"client": "librdkafka (confluent-kafka)", "version": f"{ck.libversion()[0]} ({ck.version()})"}

    def create_topic(self, topic: str, partitions: int, replicas: int, config: dict[str, str] | None = None) -> None:
        created = self._admin.create_topics([cka.NewTopic(topic, partitions, replicas, config=config or {})])
        created[topic].result(TIMEOUT_S)

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic], operation_timeout=TIMEOUT_S)[topic].result(TIMEOUT_S)

    def list_topics(self) -> list[str]:
        return sorted(self._admin.list_topics(timeout=TIMEOUT_S).topics)

    def describe_topic(self, topic: str) -> list[dict[str, Any]]:
        topics = ck.TopicCollection([topic])
        found = self._admin.describe_topics(topics)[topic].result(TIMEOUT_S)
        return [
            {
                "id": each.id,
                "leader": each.leader.id if each.leader else -1,
                "replicas": [node.id for node in each.replicas],
                "isr": [node.id for node in each.isr],
            }
            for each in found.partitions
        ]

    def describe_cluster(self) -> dict[str, Any]:
        found = self._admin.describe_cluster().result(TIMEOUT_S)
        brokers = [{"id": node.id, "host": node.host, "port": node.port, "rack": node.rack} for node in found.nodes]
        return {"brokers": brokers, "controller": found.controller.id if found.controller else -1}

    def create_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions([cka.NewPartitions(topic, total)])[topic].result(TIMEOUT_S)

    def describe_configs(self, topic: str) -> dict[str, str]:
        resource = cka.ConfigResource(cka.ResourceType.TOPIC, topic)
        found = self._admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        return {name: each.value for name, each in found.items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        entry = cka.ConfigEntry(name, value, incremental_operation=cka.AlterConfigOpType.SET)
        resource = cka.ConfigResource(cka.ResourceType.TOPIC, topic, incremental_configs=[entry])
        self._admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        end = ck.TopicPartition(topic, partition, before)
        (done,) = self._admin.delete_records([end]).values()
        return int(done.result(TIMEOUT_S).low_watermark)

    def produce(
        self,
        topic: str,
        records: list[dict[str, Any]],
        compression: str = "none",
        acks: str = "all",
        idempotent: bool = False,
        pace_ms: float = 0,
    ) -> list[list[int]]:
        config = {"compression.type": compression, "acks": acks, "enable.idempotence": idempotent, "linger.ms": 2}
        producer = ck.Producer({**self._common, **config})
        positions: list[Any] = [None] * len(records)

        def deliver(number: int) -> Any:
            def delivered(error: Any, message: Any) -> None:
                positions[number] = error or [message.partition(), message.offset()]

            return delivered

        for number, each in enumerate(records):
            timestamp = {"timestamp": each["timestamp"]} if each.get("timestamp") is not None else {}
            headers: list[tuple[str, str | bytes | None]] = [*headers_of(each)]
            producer.produce(
                topic,
                data(each["value"]),
                data(each.get("key")),
                partition=-1 if each.get("partition") is None else each["partition"],
                on_delivery=deliver(number),
                headers=headers or None,
                **timestamp,
            )
            producer.poll(pace_ms / 1000)
        producer.flush(60)
        for position in positions:
            if not isinstance(position, list):
                raise VerbError(position.code() if position else -1, str(position))
        return positions

    def _consumer(self, group: str, reset: str, **more: Any) -> Any:
        config = {
            "group.id": group,
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 1000,
            **more,
        }
        if self._rack:
            config["client.rack"] = self._rack
        return ck.Consumer({**self._common, **config})

    def consume(
        self, topic: str, partitions: dict[str, int], count: int, timeout_s: float = 30, reset: str = "earliest"
    ) -> list[dict[str, Any]]:
        consumer = self._consumer("unused", reset if reset != "none" else "error")
        consumer.assign([ck.TopicPartition(topic, int(number), offset) for number, offset in partitions.items()])
        try:
            return self._read(consumer, count, timeout_s)
        finally:
            consumer.close()

    def _read(self, consumer: Any, count: int, timeout_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(found), 0.2):
                if message.error():
                    code = message.error().code()
                    if code == ck.KafkaError._AUTO_OFFSET_RESET:
                        code = ck.KafkaError.OFFSET_OUT_OF_RANGE  # the error of the broker
                    raise VerbError(code, str(message.error()))
                found.append(_of_message(message))
        return found

    def watermarks(self, topic: str, partition: int) -> list[int]:
        consumer = self._consumer("unused", "earliest")
        try:
            return list(consumer.get_watermark_offsets(ck.TopicPartition(topic, partition), TIMEOUT_S))
        finally:
            consumer.close()

    def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        consumer = self._consumer("unused", "earliest")
        try:
            (found,) = consumer.offsets_for_times([ck.TopicPartition(topic, partition, timestamp)], TIMEOUT_S)
            if found.error:
                raise VerbError(found.error.code(), str(found.error))
            return int(found.offset)
        finally:
            consumer.close()

    def group_open(self, group: str, topics: list[str]) -> None:
        self._group = self._consumer(group, "earliest")
        self._group.subscribe(topics)

    def group_poll(self, count: int, timeout_s: float) -> dict[str, Any]:
        records = self._read(self._group, count, timeout_s)
        return {"records": records, "assigned": sorted(each.partition for each in self._group.assignment())}

    def group_commit(self) -> None:
        self._group.commit(asynchronous=False)

    def group_close(self) -> None:
        group, self._group = self._group, None
        group.close()

    def committed(self, group: str, topic: str, partition: int) -> int:
        request = cka._ConsumerGroupTopicPartitions(group, [ck.TopicPartition(topic, partition)])
        (done,) = self._admin.list_consumer_group_offsets([request]).values()
        (found,) = done.result(TIMEOUT_S).topic_partitions
        return int(found.offset)

    def list_groups(self) -> list[str]:
        return sorted(each.group_id for each in self._admin.list_consumer_groups().result(TIMEOUT_S).valid)

    def describe_group(self, group: str) -> dict[str, Any]:
        found = self._admin.describe_consumer_groups([group])[group].result(TIMEOUT_S)
        return {"state": found.state.name, "members": len(found.members)}

    def delete_group(self, group: str) -> None:
        self._admin.delete_consumer_groups([group])[group].result(TIMEOUT_S)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def code_of(error: BaseException) -> int | None:
    """Return the code of an error: negative codes are errors of the library."""
    if isinstance(error, ck.KafkaException):
        return int(error.args[0].code())
    return None


if __name__ == "__main__":
    serve(Driver, code_of)
