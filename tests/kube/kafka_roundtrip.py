"""Writes and reads records with kafka-python: `python kafka_roundtrip.py BOOTSTRAP TOPIC COUNT`. Also runs in a pod."""

from __future__ import annotations

import sys

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

PARTITIONS = 6


def main(bootstrap: str, topic: str, count: int) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    admin.create_topics([NewTopic(topic, PARTITIONS, 3)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    sent = [producer.send(topic, str(number).encode(), partition=number % PARTITIONS) for number in range(count)]
    for delivery in sent:
        delivery.get(60)
    producer.close()
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, consumer_timeout_ms=60_000)
    consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
    consumer.seek_to_beginning()
    found: list[int] = []
    for record in consumer:
        found.append(int(record.value))
        if len(found) == count:
            break
    consumer.close()
    assert sorted(found) == list(range(count)), found
    print(f"{count} records written and read")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
