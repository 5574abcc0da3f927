"""Consumer groups of third-party clients: members join, leave and fail, and resume from commits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Open = Callable[..., drivers.Driver]


class Members:
    """Members of a group that are polled together."""

    def __init__(self, *members: drivers.Driver) -> None:
        self.members = list(members)
        self.values: Counter[str] = Counter()
        self.assigned: list[list[int]] = []

    def poll(self) -> None:
        """Poll all members concurrently and commit the records of each."""
        for member in self.members:
            member.begin("group_poll", count=1000, timeout_s=1)
        found = [member.result() for member in self.members]
        self.assigned = [response["assigned"] for response in found]
        for member, response in zip(self.members, found, strict=True):
            self.values.update(record["value"] for record in response["records"])
            if response["records"]:
                member("group_commit")

    def until(self, shares: Sequence[int], count: int, timeout_s: float = 60) -> None:
        """Poll until each partition has one owner, members have `shares` partitions, and `count` values were read."""
        deadline = time.monotonic() + timeout_s
        wanted = sum(shares)
        while True:
            self.poll()
            owned = sorted(partition for partitions in self.assigned for partition in partitions)
            is_shared = sorted(len(partitions) for partitions in self.assigned) == sorted(shares)
            if is_shared and owned == list(range(wanted)) and len(self.values) >= count:
                return
            assert time.monotonic() < deadline, f"assigned {self.assigned}, {len(self.values)} of {count} values"


def test_members_join_and_leave_without_losing_records(
    driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    scenarios.create(driver, topic, 4)
    sent = scenarios.records(120, 4)
    driver("produce", topic=topic, records=sent[:40])
    first, second = open_driver(client), open_driver(client)
    group = f"group-of-{topic}"
    first("group_open", group=group, topics=[topic])
    members = Members(first)
    members.until([4], 40)
    second("group_open", group=group, topics=[topic])
    members.members.append(second)
    members.until([2, 2], 40)
    driver("produce", topic=topic, records=sent[40:80])
    members.until([2, 2], 80)
    first("group_close")
    members.members.remove(first)
    members.until([4], 80)
    driver("produce", topic=topic, records=sent[80:])
    members.until([4], 120)
    assert members.values == Counter(record["value"] for record in sent)
    second("group_close")
    again = open_driver(client)
    again("group_open", group=group, topics=[topic])
    rest = Members(again)
    rest.until([4], 0)
    rest.poll()
    assert not rest.values, "committed records are read again"
    again("group_close")


def test_partitions_of_a_killed_member_move_after_its_session_timeout(
    driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    scenarios.create(driver, topic, 2)
    first, second = open_driver(client), open_driver(client)
    for member in (first, second):
        member("group_open", group=f"group-of-{topic}", topics=[topic])
    members = Members(first, second)
    members.until([1, 1], 0)
    second.kill()
    members.members.remove(second)
    members.until([2], 0)
    sent = scenarios.records(20, 2)
    driver("produce", topic=topic, records=sent)
    members.until([2], 20)
    first("group_close")


def test_group_commits_and_is_deleted_once_it_is_empty(
    driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    scenarios.create(driver, topic, 1)
    driver("produce", topic=topic, records=scenarios.records(30))
    member, group = open_driver(client), f"group-of-{topic}"
    member("group_open", group=group, topics=[topic])
    members = Members(member)
    members.until([1], 30)
    assert driver("committed", group=group, topic=topic, partition=0) == 30
    assert group in driver("list_groups")
    assert driver("describe_group", group=group) == {"state": "STABLE", "members": 1}
    with pytest.raises(drivers.ClientError) as refused:
        driver("delete_group", group=group)
    assert refused.value.code == scenarios.NON_EMPTY_GROUP
    member("group_close")
    clusters.wait_for("the group is empty", lambda: driver("describe_group", group=group)["state"] == "EMPTY")
    driver("delete_group", group=group)
    assert group not in driver("list_groups")
