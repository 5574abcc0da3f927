// kafkajs behind the verbs that every driver knows; see drivers/serving.py.
"use strict";
const readline = require("node:readline");
const { CompressionCodecs, CompressionTypes, ConfigResourceTypes, Kafka, logLevel } = require("kafkajs");

CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");
// zstd and lz4 are left to codecs that users bring; these two have none that builds everywhere.
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
let made = null;
let member = null;
let unused = 0;

async function admin() {
  if (made === null) {
    made = kafka.admin({ retry: { retries: 3 } });
    await made.connect();
  }
  return made;
}

function refuse(code, why) {
  const error = new Error(why);
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

// A consumer that keeps what it is given until somebody asks.
class Member {
  constructor(groupId) {
    const timing = { sessionTimeout: 10000, heartbeatInterval: 1000, rebalanceTimeout: 10000, maxWaitTimeInMs: 100 };
    this.consumer = kafka.consumer({ groupId, rackId: rack || "", metadataMaxAge: 2000, ...timing });
    this.waiting = [];
    this.given = new Map();
    this.assigned = [];
    this.crash = null;
    this.consumer.on(this.consumer.events.GROUP_JOIN, ({ payload }) => {
      this.assigned = Object.values(payload.memberAssignment).flat().sort();
      this.waiting = [];
    });
    // One after which it starts again by itself is no failure: it goes on from what was committed, or the beginning.
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
          this.waiting.push({ topic: batch.topic, one: recordOf(batch.partition, message) });
        }
      },
    });
  }

  // While it starts again there is nothing that could seek.
  async seek(where, deadline) {
    for (;;) {
      try {
        return this.consumer.seek(where);
      } catch (error) {
        if (!error.message.includes("was not initialized") || Date.now() > deadline) throw error;
        if (this.crash !== null) throw this.crash;
      }
      await pause(50);
    }
  }

  async poll(count, seconds) {
    const deadline = Date.now() + seconds * 1000;
    while (this.waiting.length < count && Date.now() < deadline) await pause(20);
    if (this.crash !== null) throw this.crash;
    const found = this.waiting.splice(0, count);
    for (const { topic, one } of found) this.given.set(`${topic}:${one.partition}`, one.offset + 1);
    return found.map(({ one }) => one);
  }

  async commit() {
    const offsets = [...this.given].map(([where, offset]) => {
      const [topic, partition] = where.split(":");
      return { topic, partition: Number(partition), offset: String(offset) };
    });
    const mine = offsets.filter(({ partition }) => this.assigned.includes(partition));
    await this.consumer.commitOffsets(mine);
    this.given.clear();
  }
}

async function produce({ topic, records, compression = "none", acks = "all", idempotent = false, pace_ms = 0 }) {
  if (!(compression in CODECS)) throw new Error(`no verb for ${compression}: kafkajs has no such codec`);
  const retry = { retries: idempotent ? Number.MAX_SAFE_INTEGER : 60, maxRetryTime: 2000 };
  const producer = kafka.producer({ idempotent, maxInFlightRequests: 1, retry });
  await producer.connect();
  const placed = new Array(records.length);
  // What is sent at once is one request a partition: in portions, so that something is under way for a while.
  const portion = pace_ms ? 10 : records.length;
  for (let first = 0; first < records.length; first += portion) {
    const part = records.slice(first, first + portion);
    const messages = part.map((one) => ({
      key: data(one.key),
      value: data(one.value),
      partition: one.partition,
      timestamp: one.timestamp === undefined || one.timestamp === null ? undefined : String(one.timestamp),
      headers: Object.fromEntries((one.headers || []).map(([name, value]) => [name, data(value)])),
    }));
    const done = await producer.send({
      topic,
      messages,
      acks: acks === "all" ? -1 : Number(acks),
      compression: CODECS[compression],
    });
    const next = new Map((done || []).map(({ partition, baseOffset }) => [partition, Number(baseOffset)]));
    part.forEach((one, number) => {
      const offset = next.get(one.partition);
      placed[first + number] = [one.partition, offset];
      next.set(one.partition, offset + 1);
    });
    await pause(pace_ms * part.length);
  }
  await producer.disconnect();
  return placed;
}

async function consume({ topic, partitions, count, timeout_s = 30, reset = "earliest" }) {
  if (reset === "none") throw new Error("no verb for a consumer that does not reset");
  // It knows no assignment without a group: a group of its own, which seeks.
  const reader = new Member(`unused-${process.pid}-${(unused += 1)}`);
  const wanted = Object.entries(partitions).map(([number, offset]) => ({ partition: Number(number), offset }));
  const places = new Map();
  for (const { partition, offset } of wanted) places.set(partition, offset);
  const found = [];
  try {
    await reader.start([topic], true);
    const deadline = Date.now() + timeout_s * 1000;
    for (const { partition, offset } of wanted) await reader.seek({ topic, partition, offset: String(offset) }, deadline);
    const others = new Map((await (await admin()).fetchTopicOffsets(topic)).map((each) => [each.partition, each]));
    for (const { partition, high } of others.values()) {
      if (!places.has(partition)) await reader.seek({ topic, partition, offset: high }, deadline);
    }
    const seen = new Set();
    while (found.length < count && Date.now() < deadline) {
      for (const one of await reader.poll(1, 0.2)) {
        const from = places.get(one.partition);
        // What was read before the seek began is not what was asked for.
        if (from === undefined || from === -1 || (one.offset < from && from < Number(others.get(one.partition).high))) continue;
        const where = `${one.partition}:${one.offset}`;
        if (!seen.has(where)) found.push(one);
        seen.add(where);
      }
    }
  } finally {
    await reader.consumer.disconnect();
  }
  const byOffset = (one, other) => one.partition - other.partition || one.offset - other.offset;
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

// The number may be of an error inside: of a retrier, of an aggregate, of a group.
function codeOf(error) {
  for (const one of [error, error.cause, ...(error.errors || []), ...(error.groups || []).map((each) => each.error)]) {
    const code = one && (one.code ?? one.errorCode);
    if (Number.isInteger(code)) return code;
    if (one && one.cause) return codeOf(one.cause);
  }
  const [failed] = error.groups || [];
  return failed && Number.isInteger(failed.errorCode) ? failed.errorCode : -1;
}

async function answer(line) {
  const { verb, ...given } = JSON.parse(line);
  if (!(verb in verbs)) return { error: -1, text: `no verb ${verb}` };
  try {
    return { ok: (await verbs[verb](given)) ?? null };
  } catch (error) {
    process.stderr.write(`${error.stack}\n`);
    return { error: codeOf(error), text: error.message };
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    process.stdout.write(`${JSON.stringify(await answer(line))}\n`);
  }
  if (member !== null) await member.consumer.disconnect();
  if (made !== null) await made.disconnect();
  process.exit(0);
}

main();
