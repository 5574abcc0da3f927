"""Consumer groups by clients that others wrote: members come and go, commits hold, nothing is read twice or skipped."""

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
    """Polled in turn, until all of them together have what is wanted."""

    def __init__(self, *members: drivers.Driver) -> None:
        self.members = list(members)
        self.values: Counter[str] = Counter()
        self.assigned: list[list[int]] = []

    def poll(self) -> None:
        """Each once, at the same time; what a member read it commits."""
        for member in self.members:
            member.begin("group_poll", count=1000, timeout_s=1)
        found = [member.result() for member in self.members]
        self.assigned = [each["assigned"] for each in found]
        for member, each in zip(self.members, found, strict=True):
            self.values.update(record["value"] for record in each["records"])
            if each["records"]:
                member("group_commit")

    def until(self, shares: Sequence[int], count: int, timeout_s: float = 60) -> None:
        """Each partition belongs to one, each has as many as `shares` says, and so many records were read."""
        deadline = time.monotonic() + timeout_s
        wanted = sum(shares)
        while True:
            self.poll()
            all_of_them = sorted(partition for each in self.assigned for partition in each)
            has = sorted(len(each) for each in self.assigned) == sorted(shares)
            if has and all_of_them == list(range(wanted)) and len(self.values) >= count:
                return
            assert time.monotonic() < deadline, f"assigned {self.assigned}, {len(self.values)} of {count} values"


def test_members_come_and_go(driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str) -> None:
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
    assert members.values == Counter(each["value"] for each in sent)
    second("group_close")
    again = open_driver(client)
    again("group_open", group=group, topics=[topic])
    rest = Members(again)
    rest.until([4], 0)
    rest.poll()
    assert not rest.values, "what was committed is not read again"
    again("group_close")


def test_partitions_of_a_dead_member_move_to_the_other(
    driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    """Without a goodbye: the other has all after its session timeout."""
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
    """Can be asked for, and a group can be listed, described and, once it is empty, deleted."""
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
