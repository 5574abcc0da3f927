"""Elections, appends and failures of a metadata quorum over gRPC and files."""

from __future__ import annotations

from pathlib import Path

from quorum_support import Quorum, until


async def test_one_of_three_is_elected_and_commits_on_a_majority(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a", b"b")
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))
        assert all(node.log_values == [b"a", b"b"] for node in quorum.all)
        assert all(node.driver.leader_id == leader.node_id for node in quorum.all)
        assert leader.listener.of("committed")[-1] == end
        assert not any(node.failures for node in quorum.all)
