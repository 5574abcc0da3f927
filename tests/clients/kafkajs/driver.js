// Driver of kafkajs; see drivers/serving.py.
"use strict";
const readline = require("node:readline");
const { CompressionCodecs, CompressionTypes, ConfigResourceTypes, Kafka, logLevel } = require("kafkajs");

CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");
// kafkajs needs plug-ins for zstd and lz4, and none of them builds on all machines.
const CODECS = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy };

const kafka = new Kafka({
  clientId: "kipmesh-kafkajs",
  brokers: process.argv[2].split(","),
  logLevel: logLevel.ERROR,
  retry: { initialRetryTime: 100, maxRetryTime: 2000, retries: 60 },
  logCreator: () => ({ log }) => process.stderr.write(`${log.message} ${log.error || ""}\n`),
});
const { rack } = JSON.parse(process.argv[3] || "{}");
const data = (text) => (text === null || text === undefined ? null : Buffer.from(text, "base64"));
const text = (value) => (value === null || value === undefined ? null : Buffer.from(value).toString("base64"));
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let adminClient = null;
let member = null;
let unused = 0;

async function admin() {
  if (adminClient === null) {
    adminClient = kafka.admin({ retry: { retries: 3 } });
    await adminClient.connect();
  }
  return adminClient;
}

function refuse(code, reason) {
  const error = new Error(reason);
  error.code = code;
  throw error;
}

function recordOf(partition, message) {
  const headers = Object.entries(message.headers || {}).map(([name, value]) => [name, text(value)]);
  return {
    partition,
    offset: Number(message.offset),
    key: text(message.key),
    value: text(message.value),
    timestamp: Number(message.timestamp),
    headers,
  };
}

// A consumer that buffers records until they are polled.
class Member {
  constructor(groupId) {
    const timing = { sessionTimeout: 10000, heartbeatInterval: 1000, rebalanceTimeout: 10000, maxWaitTimeInMs: 100 };
    this.consumer = kafka.consumer({ groupId, rackId: rack || "", metadataMaxAge: 2000, ...timing });
    this.buffered = [];
    this.positions = new Map();
    this.assigned = [];
    this.crash = null;
    this.consumer.on(this.consumer.events.GROUP_JOIN, ({ payload }) => {
      this.assigned = Object.values(payload.memberAssignment).flat().sort();
      this.buffered = [];
    });
    // A crash with a restart is not an error: the consumer resumes from its commits or the beginning.
    this.consumer.on(this.consumer.events.CRASH, ({ payload }) => payload.restart || (this.crash = payload.error));
  }

  async start(topics, fromBeginning) {
    this.topics = topics;
    await this.consumer.connect();
    await this.consumer.subscribe({ topics, fromBeginning });
    await this.consumer.run({
      autoCommit: false,
      eachBatchAutoResolve: true,
      eachBatch: async ({ batch }) => {
        for (const message of batch.messages) {
          this.buffered.push({ topic: batch.topic, record: recordOf(batch.partition, message) });
        }
      },
    });
  }

  // Retries while the consumer restarts, because it cannot seek then.
  async seek(position, deadline) {
    for (;;) {
      try {
        return this.consumer.seek(position);
      } catch (error) {
        if (!error.message.includes("was not initialized") || Date.now() > deadline) throw error;
        if (this.crash !== null) throw this.crash;
      }
      await pause(50);
    }
  }

  async poll(count, seconds) {
    const deadline = Date.now() + seconds * 1000;
    while (this.buffered.length < count && Date.now() < deadline) await pause(20);
    if (this.crash !== null) throw this.crash;
    const found = this.buffered.splice(0, count);
    for (const { topic, record } of found) this.positions.set(`${topic}:${record.partition}`, record.offset + 1);
    return found.map(({ record }) => record);
  }

  async commit() {
    const offsets = [...this.positions].map(([key, offset]) => {
      const [topic, partition] = key.split(":");
      return { topic, partition: Number(partition), offset: String(offset) };
    });
    const assigned = offsets.filter(({ partition }) => this.assigned.includes(partition));
    await this.consumer.commitOffsets(assigned);
    this.positions.clear();
  }
}

async function produce({ topic, records, compression = "none", acks = "all", idempotent = false, pace_ms = 0 }) {
  if (!(compression in CODECS)) throw new Error(`no verb for ${compression}: kafkajs has no such codec`);
  const retry = { retries: idempotent ? Number.MAX_SAFE_INTEGER : 60, maxRetryTime: 2000 };
  const producer = kafka.producer({ idempotent, maxInFlightRequests: 1, retry });
  await producer.connect();
  const positions = new Array(records.length);
  // One send is one request per partition. Several sends keep requests in flight while a test kills a broker.
  const portion = pace_ms ? 10 : records.length;
  for (let first = 0; first < records.length; first += portion) {
    const part = records.slice(first, first + portion);
    const messages = part.map((record) => ({
      key: data(record.key),
      value: data(record.value),
      partition: record.partition,
      timestamp: record.timestamp === undefined || record.timestamp === null ? undefined : String(record.timestamp),
      headers: Object.fromEntries((record.headers || []).map(([name, value]) => [name, data(value)])),
    }));
    const done = await producer.send({
      topic,
      messages,
      acks: acks === "all" ? -1 : Number(acks),
      compression: CODECS[compression],
    });
    const next = new Map((done || []).map(({ partition, baseOffset }) => [partition, Number(baseOffset)]));
    part.forEach((record, number) => {
      const offset = next.get(record.partition);
      positions[first + number] = [record.partition, offset];
      next.set(record.partition, offset + 1);
    });
    await pause(pace_ms * part.length);
  }
  await producer.disconnect();
  return positions;
}

async function consume({ topic, partitions, count, timeout_s = 30, reset = "earliest" }) {
  if (reset === "none") throw new Error("no verb for a consumer that does not reset");
  // kafkajs assigns partitions only to groups: each read joins a new group and seeks.
  const reader = new Member(`unused-${process.pid}-${(unused += 1)}`);
  const wanted = Object.entries(partitions).map(([number, offset]) => ({ partition: Number(number), offset }));
  const starts = new Map();
  for (const { partition, offset } of wanted) starts.set(partition, offset);
  const found = [];
  try {
    await reader.start([topic], true);
    const deadline = Date.now() + timeout_s * 1000;
    for (const { partition, offset } of wanted) await reader.seek({ topic, partition, offset: String(offset) }, deadline);
    const watermarks = new Map((await (await admin()).fetchTopicOffsets(topic)).map((each) => [each.partition, each]));
    for (const { partition, high } of watermarks.values()) {
      if (!starts.has(partition)) await reader.seek({ topic, partition, offset: high }, deadline);
    }
    const seen = new Set();
    while (found.length < count && Date.now() < deadline) {
      for (const record of await reader.poll(1, 0.2)) {
        const from = starts.get(record.partition);
        if (from === undefined || from === -1) continue;
        // Skip records that were read before the seek took effect.
        if (record.offset < from && from < Number(watermarks.get(record.partition).high)) continue;
        const key = `${record.partition}:${record.offset}`;
        if (!seen.has(key)) found.push(record);
        seen.add(key);
      }
    }
  } finally {
    await reader.consumer.disconnect();
  }
  const byOffset = (left, right) => left.partition - right.partition || left.offset - right.offset;
  return found.sort(byOffset);
}

async function describeTopic({ topic }) {
  const { topics } = await (await admin()).fetchTopicMetadata({ topics: [topic] });
  return topics[0].partitions.map(({ partitionId, leader, replicas, isr }) => ({ id: partitionId, leader, replicas, isr }));
}

const verbs = {
  hello: async () => ({ client: "kafkajs", version: require("kafkajs/package.json").version }),
  create_topic: async ({ topic, partitions, replicas, config = {} }) => {
    const configEntries = Object.entries(config).map(([name, value]) => ({ name, value }));
    const wanted = { topic, numPartitions: partitions, replicationFactor: replicas, configEntries };
    const done = await (await admin()).createTopics({ topics: [wanted], waitForLeaders: false });
    if (!done) refuse(36, "the topic exists");
  },
  delete_topic: async ({ topic }) => (await admin()).deleteTopics({ topics: [topic] }).then(() => null),
  list_topics: async () => (await admin()).listTopics(),
  describe_topic: describeTopic,
  describe_cluster: async () => {
    const { brokers, controller } = await (await admin()).describeCluster();
    return { brokers: brokers.map(({ nodeId, host, port }) => ({ id: nodeId, host, port })), controller };
  },
  create_partitions: async ({ topic, total }) =>
    (await admin()).createPartitions({ topicPartitions: [{ topic, count: total }] }).then(() => null),
  describe_configs: async ({ topic }) => {
    const resources = [{ type: ConfigResourceTypes.TOPIC, name: topic }];
    const found = await (await admin()).describeConfigs({ resources, includeSynonyms: false });
    return Object.fromEntries(found.resources[0].configEntries.map(({ configName, configValue }) => [configName, configValue]));
  },
  delete_records: async ({ topic, partition, before }) => {
    await (await admin()).deleteTopicRecords({ topic, partitions: [{ partition, offset: String(before) }] });
    const found = await (await admin()).fetchTopicOffsets(topic);
    return Number(found.find((each) => each.partition === partition).low);
  },
  produce,
  consume,
  watermarks: async ({ topic, partition }) => {
    const found = (await (await admin()).fetchTopicOffsets(topic)).find((each) => each.partition === partition);
    return [Number(found.low), Number(found.high)];
  },
  offset_for_time: async ({ topic, partition, timestamp }) => {
    const found = await (await admin()).fetchTopicOffsetsByTimestamp(topic, timestamp);
    return Number(found.find((each) => each.partition === partition).offset);
  },
  group_open: async ({ group, topics }) => {
    member = new Member(group);
    await member.start(topics, true);
  },
  group_poll: async ({ count, timeout_s }) => {
    const records = await member.poll(count, timeout_s);
    return { records, assigned: member.assigned };
  },
  group_commit: async () => member.commit(),
  group_close: async () => {
    await member.consumer.disconnect();
    member = null;
  },
  committed: async ({ group, topic, partition }) => {
    const [found] = await (await admin()).fetchOffsets({ groupId: group, topics: [topic] });
    return Number(found.partitions.find((each) => each.partition === partition).offset);
  },
  list_groups: async () => (await (await admin()).listGroups()).groups.map(({ groupId }) => groupId),
  describe_group: async ({ group }) => {
    const { groups } = await (await admin()).describeGroups([group]);
    return { state: groups[0].state.toUpperCase(), members: groups[0].members.length };
  },
  delete_group: async ({ group }) => (await admin()).deleteGroups([group]).then(() => null),
};

// Returns Kafka's error code, which may be in an error wrapped by a retrier, an aggregate or a group.
function codeOf(error) {
  for (const inner of [error, error.cause, ...(error.errors || []), ...(error.groups || []).map((each) => each.error)]) {
    const code = inner && (inner.code ?? inner.errorCode);
    if (Number.isInteger(code)) return code;
    if (inner && inner.cause) return codeOf(inner.cause);
  }
  const [failed] = error.groups || [];
  return failed && Number.isInteger(failed.errorCode) ? failed.errorCode : -1;
}

async function respond(line) {
  const { verb, ...options } = JSON.parse(line);
  if (!(verb in verbs)) return { error: -1, text: `no verb ${verb}` };
  try {
    return { ok: (await verbs[verb](options)) ?? null };
  } catch (error) {
    process.stderr.write(`${error.stack}\n`);
    return { error: codeOf(error), text: error.message };
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    process.stdout.write(`${JSON.stringify(await respond(line))}\n`);
  }
  if (member !== null) await member.consumer.disconnect();
  if (adminClient !== null) await adminClient.disconnect();
  process.exit(0);
}

main();
