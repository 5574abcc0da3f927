"""Control records of the metadata log and its snapshots. Each value starts with its version."""

from collections.abc import Sequence

from kipmesh.messages.schema import Int16, Int32, Int64, Message, field


class Voter(Message):
    """A voter, in version 0 of LeaderChangeMessage."""

    voter_id: Int32 = field()


class LeaderChangeMessage(Message, key=2, versions="0", flexible="0+"):
    """The first record of every epoch: the leader, the voters, and the voters that granted their vote."""

    version: Int16 = field()
    leader_id: Int32 = field()
    voters: Sequence[Voter] = field()
    granting_voters: Sequence[Voter] = field()


class SnapshotHeader(Message, key=3, versions="0", flexible="0+"):
    """The first record of a snapshot."""

    version: Int16 = field()
    # The append time of the last record in the snapshot, in ms.
    last_contained_log_timestamp: Int64 = field()


class SnapshotFooter(Message, key=4, versions="0", flexible="0+"):
    """The last record of a complete snapshot."""

    version: Int16 = field()
