import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Driver of Apache Kafka's Java client; see drivers/serving.py. */
public final class Driver {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final long TIMEOUT_S = 30;

    private final String bootstrap;
    private final String rack;
    private Admin admin;
    private KafkaConsumer<byte[], byte[]> group;

    private Driver(String bootstrap, JsonNode options) {
        this.bootstrap = bootstrap;
        this.rack = options.path("rack").asText("");
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err);
        Driver driver = new Driver(arguments[0], JSON.readTree(arguments.length > 1 ? arguments[1] : "{}"));
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Map<String, Object> response = new LinkedHashMap<>();
            try {
                response.put("ok", driver.respond(JSON.readTree(line)));
            } catch (Throwable thrown) {
                Throwable error = thrown instanceof ExecutionException ? thrown.getCause() : thrown;
                error.printStackTrace();
                response.put("error", codeOf(error));
                response.put("text", String.valueOf(error.getMessage()));
            }
            out.println(JSON.writeValueAsString(response));
            out.flush();
        }
        if (driver.group != null) {
            driver.group.close();
        }
        if (driver.admin != null) {
            driver.admin.close(Duration.ofSeconds(5));
        }
    }

    private static int codeOf(Throwable error) {
        if (error instanceof OffsetOutOfRangeException) {
            return Errors.OFFSET_OUT_OF_RANGE.code();
        }
        return Errors.forException(error).code();
    }

    private Object respond(JsonNode request) throws Exception {
        String topic = request.path("topic").asText();
        int partition = request.path("partition").asInt();
        String groupId = request.path("group").asText();
        switch (request.get("verb").asText()) {
            case "hello": return Map.of("client", "Apache Kafka's Java client", "version",
                org.apache.kafka.common.utils.AppInfoParser.getVersion());
            case "create_topic": return createTopic(request, topic);
            case "delete_topic": return done(admin().deleteTopics(List.of(topic)).all());
            case "list_topics": return done(admin().listTopics().names());
            case "describe_topic": return describeTopic(topic);
            case "describe_cluster": return describeCluster();
            case "create_partitions": return done(admin().createPartitions(
                Map.of(topic, NewPartitions.increaseTo(request.get("total").asInt()))).all());
            case "describe_configs": return describeConfigs(topic);
            case "alter_config": return alterConfig(topic, request);
            case "delete_records": return done(admin().deleteRecords(Map.of(new TopicPartition(topic, partition),
                RecordsToDelete.beforeOffset(request.get("before").asLong()))).lowWatermarks()
                .get(new TopicPartition(topic, partition))).lowWatermark();
            case "produce": return produce(request, topic);
            case "consume": return consume(request, topic);
            case "watermarks": return watermarks(new TopicPartition(topic, partition));
            case "offset_for_time": return offsetForTime(new TopicPartition(topic, partition), request);
            case "group_open": return groupOpen(request, groupId);
            case "group_poll": return groupPoll(request);
            case "group_commit": group.commitSync(); return null;
            case "group_close": group.close(); group = null; return null;
            case "committed": return committed(groupId, new TopicPartition(topic, partition));
            case "list_groups": return done(admin().listGroups().all()).stream().map(g -> g.groupId()).toList();
            case "describe_group": return describeGroup(groupId);
            case "delete_group": return done(admin().deleteConsumerGroups(List.of(groupId)).all());
            default: throw new IllegalArgumentException("no verb " + request.get("verb").asText());
        }
    }

    private Admin admin() {
        if (admin == null) {
            admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
        }
        return admin;
    }

    private static <T> T done(Future<T> future) throws Exception {
        return future.get(TIMEOUT_S, TimeUnit.SECONDS);
    }

    private Object createTopic(JsonNode request, String topic) throws Exception {
        Map<String, String> config = new HashMap<>();
        request.path("config").properties().forEach(each -> config.put(each.getKey(), each.getValue().asText()));
        NewTopic wanted = new NewTopic(topic, request.get("partitions").asInt(), (short) request.get("replicas").asInt());
        return done(admin().createTopics(List.of(wanted.configs(config))).all());
    }

    private Object describeTopic(String topic) throws Exception {
        List<Object> found = new ArrayList<>();
        done(admin().describeTopics(List.of(topic)).topicNameValues().get(topic)).partitions().forEach(each -> found.add(
            Map.of("id", each.partition(), "leader", each.leader() == null ? -1 : each.leader().id(),
                "replicas", ids(each.replicas()), "isr", ids(each.isr()))));
        return found;
    }

    private static List<Integer> ids(Collection<Node> nodes) {
        return nodes.stream().map(Node::id).toList();
    }

    private Object describeCluster() throws Exception {
        var described = admin().describeCluster();
        List<Object> brokers = new ArrayList<>();
        for (Node node : done(described.nodes())) {
            brokers.add(Map.of("id", node.id(), "host", node.host(), "port", node.port(), "rack",
                Optional.ofNullable(node.rack()).orElse("")));
        }
        return Map.of("brokers", brokers, "controller", done(described.controller()).id());
    }

    private Object describeConfigs(String topic) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        Map<String, String> found = new TreeMap<>();
        done(admin().describeConfigs(List.of(resource)).values().get(resource)).entries()
            .forEach(each -> found.put(each.name(), each.value()));
        return found;
    }

    private Object alterConfig(String topic, JsonNode request) throws Exception {
        ConfigEntry entry = new ConfigEntry(request.get("name").asText(), request.get("value").asText());
        return done(admin().incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.TOPIC, topic),
            List.of(new AlterConfigOp(entry, AlterConfigOp.OpType.SET)))).all());
    }

    private Object produce(JsonNode request, String topic) throws Exception {
        Map<String, Object> config = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "linger.ms", 2,
            "compression.type", request.path("compression").asText("none"), "acks", request.path("acks").asText("all"),
            "enable.idempotence", request.path("idempotent").asBoolean(false)));
        long paceMs = request.path("pace_ms").asLong(0);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<Object> positions = new ArrayList<>();
        try (var producer = new KafkaProducer<>(config, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (JsonNode record : request.get("records")) {
                var produced = new ProducerRecord<byte[], byte[]>(topic,
                    record.path("partition").isNumber() ? record.get("partition").asInt() : null,
                    record.path("timestamp").isNumber() ? record.get("timestamp").asLong() : null,
                    data(record.path("key")), data(record.path("value")));
                for (JsonNode header : record.path("headers")) {
                    produced.headers().add(header.get(0).asText(), data(header.get(1)));
                }
                sent.add(producer.send(produced));
                Thread.sleep(paceMs);
            }
            for (Future<RecordMetadata> each : sent) {
                RecordMetadata found = each.get(60, TimeUnit.SECONDS);
                positions.add(List.of(found.partition(), found.offset()));
            }
        }
        return positions;
    }

    private static byte[] data(JsonNode value) {
        return value.isTextual() ? Base64.getDecoder().decode(value.asText()) : null;
    }

    private static String text(byte[] value) {
        return value == null ? null : Base64.getEncoder().encodeToString(value);
    }

    private KafkaConsumer<byte[], byte[]> consumer(String groupId, String reset) {
        Map<String, Object> config = new HashMap<>(Map.of("bootstrap.servers", bootstrap, "enable.auto.commit", false,
            "auto.offset.reset", reset, "fetch.max.wait.ms", 100, "session.timeout.ms", 10_000,
            "heartbeat.interval.ms", 1000, "client.rack", rack));
        if (groupId != null) {
            config.put("group.id", groupId);
        }
        return new KafkaConsumer<>(config, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Object consume(JsonNode request, String topic) {
        try (var consumer = consumer(null, request.path("reset").asText("earliest"))) {
            Map<TopicPartition, Long> wanted = new HashMap<>();
            request.get("partitions").properties().forEach(each -> wanted.put(
                new TopicPartition(topic, Integer.parseInt(each.getKey())), each.getValue().asLong()));
            consumer.assign(wanted.keySet());
            wanted.forEach((topicPartition, offset) -> {
                if (offset == -2) {
                    consumer.seekToBeginning(List.of(topicPartition));
                } else if (offset == -1) {
                    consumer.seekToEnd(List.of(topicPartition));
                } else {
                    consumer.seek(topicPartition, offset);
                }
            });
            return read(consumer, request.get("count").asInt(), request.path("timeout_s").asDouble(30));
        }
    }

    private static List<Object> read(KafkaConsumer<byte[], byte[]> consumer, int count, double timeoutS) {
        List<Object> found = new ArrayList<>();
        long deadline = System.nanoTime() + (long) (timeoutS * 1e9);
        while (found.size() < count && System.nanoTime() < deadline) {
            for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofMillis(200))) {
                List<Object> headers = new ArrayList<>();
                for (Header header : each.headers()) {
                    headers.add(List.of(header.key(), text(header.value())));
                }
                Map<String, Object> record = new LinkedHashMap<>();
                record.put("partition", each.partition());
                record.put("offset", each.offset());
                record.put("key", text(each.key()));
                record.put("value", text(each.value()));
                record.put("timestamp", each.timestamp());
                record.put("headers", headers);
                found.add(record);
            }
        }
        return found;
    }

    private Object watermarks(TopicPartition topicPartition) {
        try (var consumer = consumer(null, "earliest")) {
            return List.of(consumer.beginningOffsets(List.of(topicPartition)).get(topicPartition),
                consumer.endOffsets(List.of(topicPartition)).get(topicPartition));
        }
    }

    private Object offsetForTime(TopicPartition topicPartition, JsonNode request) {
        try (var consumer = consumer(null, "earliest")) {
            var found = consumer.offsetsForTimes(Map.of(topicPartition, request.get("timestamp").asLong())).get(topicPartition);
            return found == null ? -1 : found.offset();
        }
    }

    private Object groupOpen(JsonNode request, String groupId) {
        group = consumer(groupId, "earliest");
        List<String> topics = new ArrayList<>();
        request.get("topics").forEach(each -> topics.add(each.asText()));
        group.subscribe(topics);
        return null;
    }

    private Object groupPoll(JsonNode request) {
        List<Object> records = read(group, request.get("count").asInt(), request.get("timeout_s").asDouble());
        return Map.of("records", records, "assigned", group.assignment().stream().map(p -> p.partition()).sorted().toList());
    }

    private Object committed(String groupId, TopicPartition topicPartition) throws Exception {
        OffsetAndMetadata found = done(admin().listConsumerGroupOffsets(groupId).partitionsToOffsetAndMetadata()).get(topicPartition);
        return found == null ? -1 : found.offset();
    }

    private Object describeGroup(String groupId) throws Exception {
        var found = done(admin().describeConsumerGroups(List.of(groupId)).describedGroups().get(groupId));
        return Map.of("state", found.groupState().name().toUpperCase(Locale.ROOT), "members", found.members().size());
    }
}
