"""Spark and a cluster with TLS: options for driver and tasks, reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_batch_is_written_and_read_over_tls(spark: SparkSession) -> None:
    with LocalCluster(mode="single", tls=True) as cluster:
        with AdminClient(cluster.bootstrap, **cluster.client_config) as admin:
            admin.create_topics([NewTopic("flights", 3, 3)])
        connection = {"kafka.bootstrap.servers": cluster.bootstrap}
        tls = {f"kafka.{key}": value for key, value in cluster.client_config.items()}
        frame = spark.range(100).selectExpr("cast(id as string) as value")
        frame.write.format("kipmesh").options(topic="flights", **connection, **tls).mode("append").save()
        rows = spark.read.format("kipmesh").options(subscribe="flights", **connection, **tls).load().collect()
        assert sorted(int(row.value) for row in rows) == list(range(100))
        limits = {"kafka.request.timeout.ms": "6000", "kafka.default.api.timeout.ms": "6000"}
        plaintext = spark.read.format("kipmesh").options(subscribe="flights", **connection, **limits).load()
        with pytest.raises(Exception, match=r"does it want security\.protocol=SSL\?"):
            plaintext.collect()
