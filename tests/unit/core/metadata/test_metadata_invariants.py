"""Random requests: `check_image` holds after every decision, and the log replays to the same image."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.records import PartitionChangeRecord
from kipmesh.messages import ElectionType
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

BROKER = st.integers(1, 4)
NAME = st.sampled_from(["a", "b", "c.d", "c_d", "__cluster_metadata"])


class ControllerMachine(RuleBasedStateMachine):
    """Random requests. Brokers report random log ends when requested."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = Controller()
        self.incarnations = dict.fromkeys(range(1, 5), 0)
        self.wanted: dict[int, list[m.TopicIdPartition]] = {}

    @rule(broker=BROKER, clean=st.booleans(), leads=st.booleans(), again=st.booleans())
    def register(self, broker: int, *, clean: bool, leads: bool, again: bool) -> None:
        known = self.controller.image.brokers.get(broker)
        incarnation = self.incarnations[broker] + (not again)
        previous = known.broker_epoch if known and clean else -1
        response = self.controller.register(broker, incarnation, previous, leads=leads, rack=f"rack-{broker % 3}")
        assert response.error_code in (0, ErrorCode.DUPLICATE_BROKER_REGISTRATION)
        if not response.error_code:
            self.incarnations[broker] = incarnation
            if not again and not clean:
                for state in (p for t in self.controller.image.topics.values() for p in t.partitions.values()):
                    assert broker not in state.isr

    @rule(
        broker=BROKER,
        lag=st.integers(0, 5),
        fence=st.sampled_from([False, False, False, True]),
        shut_down=st.sampled_from([False, False, False, True]),
        data=st.data(),
    )
    def heartbeat(self, broker: int, lag: int, *, fence: bool, shut_down: bool, data: st.DataObject) -> None:
        if broker not in self.controller.image.brokers:
            return
        ends = [
            m.PartitionLogEnd(
                wanted.topic_id, wanted.partition, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))
            )
            for wanted in self.wanted.pop(broker, [])
        ]
        offset = max(self.controller.image.offset - lag, -1)
        response = self.controller.heartbeat(broker, offset=offset, fence=fence, shut_down=shut_down, log_ends=ends)
        assert response.error_code == 0
        assert response.is_fenced == self.controller.image.brokers[broker].fenced
        self.wanted[broker] = list(response.wanted_log_ends)

    @rule(passed=st.integers(1, SESSION_MS))
    def time_passes(self, passed: int) -> None:
        self.controller.now_ms += passed
        self.controller.expire()

    @rule()
    def new_controller(self) -> None:
        self.controller.restart()

    @rule(name=NAME, partitions=st.integers(-2, 4), replicas=st.integers(-2, 5), unclean=st.booleans())
    def create(self, name: str, partitions: int, replicas: int, *, unclean: bool) -> None:
        values = {"unclean_leader_election_enable": "true"} if unclean else {}
        self.controller.create(name, partitions, replicas, **values)

    @rule(name=NAME)
    def delete(self, name: str) -> None:
        self.controller.run(self.controller.core.delete_topics(m.DeleteTopicsRequest([m.DeleteTopicState(name)])))

    @rule(name=NAME, count=st.integers(0, 8))
    def create_partitions(self, name: str, count: int) -> None:
        request = m.CreatePartitionsRequest([m.CreatePartitionsTopic(name, count)])
        self.controller.run(self.controller.core.create_partitions(request))

    @rule(name=NAME, value=st.sampled_from(["true", "false", "nonsense"]))
    def configure(self, name: str, value: str) -> None:
        setting = m.AlterableConfig("unclean.leader.election.enable", 0, value)
        request = m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(2, name, [setting])])
        self.controller.run(self.controller.core.incremental_alter_configs(request))
        self.controller.run(self.controller.elect_pending())

    @precondition(lambda self: self.controller.image.topics)
    @rule(data=st.data(), isr=st.lists(BROKER, max_size=4))
    def alter(self, data: st.DataObject, isr: list[int]) -> None:
        image = self.controller.image
        topic = data.draw(st.sampled_from(sorted(image.topics)))
        partition = data.draw(st.sampled_from(sorted(image.topics[topic].partitions)))
        state = image.topics[topic].partitions[partition]
        if state.leader == -1:
            return
        members = [m.IsrMember(i) for i in isr]
        epoch = state.partition_epoch + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
        self.controller.alter_isr(topic, partition, isr, members=members, partition_epoch=epoch)

    @rule(
        kind=st.sampled_from(list(ElectionType)),
        wanted=st.lists(st.tuples(NAME, st.integers(-1, 4)), max_size=5),
        withdraws=st.booleans(),
    )
    def elect(self, kind: ElectionType, wanted: list[tuple[str, int]], *, withdraws: bool) -> None:
        core = self.controller.core
        results = self.controller.run(core.elect_leaders(kind, wanted))
        assert [(result.topic, result.partition) for result in results] == list(dict.fromkeys(wanted))
        for result in results:
            topic = self.controller.image.topic_by_name(result.topic)
            state = topic.partitions.get(result.partition) if topic is not None else None
            if result.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                assert state is None
                continue
            assert state is not None
            if result.code in (ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED):
                assert state.leader == (state.replicas[0] if kind is ElectionType.PREFERRED else state.leader) != -1
            elif kind is ElectionType.UNCLEAN:
                assert state.leader == -1
        if withdraws:
            self.controller.run(core.withdraw_elections(wanted))

    @rule(count_max=st.integers(1, 3))
    def balance(self, count_max: int) -> None:
        core = self.controller.core
        keys = core.preferred_candidates().response
        moved = self.controller.run(core.elect_preferred(keys, count_max))
        assert moved <= count_max
        for record in self.controller.last_records:
            assert isinstance(record, PartitionChangeRecord)
            assert record.isr is None
            state = self.controller.state(record.topic_id, record.partition_id)
            assert state.leader == state.replicas[0]
            assert state.leader_recovery_state == 0

    @invariant()
    def waiting_partitions_have_required_brokers(self) -> None:
        image = self.controller.image
        for topic_id, partition in image.leaderless:
            state = image.topics[topic_id].partitions[partition]
            assert state.last_isr
            if state.isr:
                assert image.required_brokers(topic_id, partition), "an eligible ISR member does not lead"

    def teardown(self) -> None:
        image = MetadataImage()
        for batch in self.controller.batches:
            image.replay(batch, MetadataDelta())
        assert image == self.controller.image


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
