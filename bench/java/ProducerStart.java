import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Future;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

import javax.management.MBeanServerConnection;
import javax.management.ObjectName;
import javax.management.remote.JMXConnector;
import javax.management.remote.JMXConnectorFactory;
import javax.management.remote.JMXServiceURL;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.network.ByteBufferSend;
import org.apache.kafka.common.network.NetworkReceive;
import org.apache.kafka.common.network.NetworkSend;
import org.apache.kafka.common.network.Selectable;
import org.apache.kafka.common.network.Send;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.requests.MetadataRequest;
import org.apache.kafka.common.requests.RequestHeader;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Sends one record to each of many topics with Apache Kafka's producer, as `bench/metadata.py` does with ours.
 *
 * Arguments: bootstrap address, JMX port of the broker, `create`, `awaited` or `burst`, number of topics, and for
 * `create` the number of replicas. Prints one JSON object. Counts metadata requests between the client and its
 * sockets, and in the broker. Bytes are those of requests and responses with their headers.
 */
public final class ProducerStart {
    private static final byte[] VALUE = "x".repeat(100).getBytes();
    private static final int CREATED_AT_ONCE = 500;

    private static long requests;
    private static long topics;
    private static long bytes;
    private static final Set<Integer> UNDER_WAY = new HashSet<>();

    private ProducerStart() {
    }

    public static void main(String[] given) throws Exception {
        String bootstrap = given[0];
        List<String> names = IntStream.range(0, Integer.parseInt(given[3]))
            .mapToObj(number -> String.format(Locale.ROOT, "metadata-%06d", number)).collect(Collectors.toList());
        if (given[2].equals("create")) {
            create(bootstrap, names, Short.parseShort(given[4]));
            System.out.println("{}");
            return;
        }
        String url = "service:jmx:rmi:///jndi/rmi://127.0.0.1:" + given[1] + "/jmxrmi";
        try (JMXConnector connector = JMXConnectorFactory.connect(new JMXServiceURL(url))) {
            MBeanServerConnection broker = connector.getMBeanServerConnection();
            double[] before = brokerCounts(broker);
            double seconds = produce(bootstrap, names, given[2].equals("awaited"));
            double[] after = brokerCounts(broker);
            System.out.printf(
                Locale.ROOT,
                "{\"total_s\": %.4f, \"requests\": %d, \"topics\": %d, \"bytes\": %d, \"peak_mib\": %.1f, "
                    + "\"broker_requests\": %.0f, \"broker_received_bytes\": %.0f}%n",
                seconds, requests, topics, bytes, peakMib(), after[0] - before[0], after[1] - before[1]);
        }
    }

    private static void create(String bootstrap, List<String> names, short replicas) throws Exception {
        Properties config = new Properties();
        config.put("bootstrap.servers", bootstrap);
        config.put("default.api.timeout.ms", 300_000);
        try (Admin admin = Admin.create(config)) {
            for (int first = 0; first < names.size(); first += CREATED_AT_ONCE) {
                List<NewTopic> fresh = new ArrayList<>();
                for (String name : names.subList(first, Math.min(first + CREATED_AT_ONCE, names.size()))) {
                    fresh.add(new NewTopic(name, 1, replicas));
                }
                admin.createTopics(fresh).all().get();
            }
            // All topics exist once the brokers can describe the last one.
            while (true) {
                try {
                    admin.describeTopics(names.subList(names.size() - 1, names.size())).allTopicNames().get();
                    return;
                } catch (java.util.concurrent.ExecutionException error) {
                    Thread.sleep(100);
                }
            }
        }
    }

    private static double produce(String bootstrap, List<String> names, boolean awaited) throws Exception {
        Properties config = new Properties();
        config.put("bootstrap.servers", bootstrap);
        config.put("acks", "all");
        config.put("linger.ms", 0);
        config.put("max.block.ms", 600_000);
        config.put("delivery.timeout.ms", 600_000);
        config.put("enable.metrics.push", false);
        long begin = System.nanoTime();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(config, new ByteArraySerializer(), new ByteArraySerializer())) {
            count(producer);
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (String name : names) {
                Future<RecordMetadata> one = producer.send(new ProducerRecord<>(name, VALUE));
                if (awaited) {
                    one.get();
                } else {
                    sent.add(one);
                }
            }
            for (Future<RecordMetadata> one : sent) {
                one.get();
            }
            return (System.nanoTime() - begin) / 1e9;
        }
    }

    /** Inserts a counter between the producer's network client and its sockets. */
    private static void count(KafkaProducer<byte[], byte[]> producer) throws Exception {
        Object client = field(field(producer, "sender"), "client");
        Field place = place(client.getClass(), "selector");
        Selectable selector = (Selectable) place.get(client);
        place.set(client, Proxy.newProxyInstance(
            Selectable.class.getClassLoader(), new Class<?>[] {Selectable.class}, (proxy, method, arguments) -> {
                if (method.getName().equals("send")) {
                    sends((NetworkSend) arguments[0]);
                }
                Object result;
                try {
                    result = method.invoke(selector, arguments);
                } catch (java.lang.reflect.InvocationTargetException error) {
                    throw error.getCause();
                }
                if (!UNDER_WAY.isEmpty() && method.getName().equals("poll")) {
                    for (NetworkReceive received : selector.completedReceives()) {
                        receives(received.payload());
                    }
                }
                return result;
            }));
    }

    private static void sends(NetworkSend sent) throws Exception {
        Send send = sent.send();
        if (!(send instanceof ByteBufferSend)) {
            return; // records
        }
        ByteBuffer[] parts = (ByteBuffer[]) field(send, "buffers");
        ByteBuffer whole = ByteBuffer.allocate((int) send.size());
        for (ByteBuffer part : parts) {
            whole.put(part.duplicate());
        }
        whole.flip();
        whole.getInt(); // its length
        if (whole.getShort(whole.position()) != ApiKeys.METADATA.id) {
            return;
        }
        RequestHeader header = RequestHeader.parse(whole);
        MetadataRequest request = MetadataRequest.parse(new ByteBufferAccessor(whole), header.apiVersion());
        requests++;
        topics += request.topics().size();
        bytes += send.size();
        UNDER_WAY.add(header.correlationId());
    }

    private static void receives(ByteBuffer payload) {
        if (UNDER_WAY.remove(payload.getInt(payload.position()))) {
            bytes += payload.remaining() + Integer.BYTES;
        }
    }

    private static Field place(Class<?> type, String name) throws Exception {
        Field found = type.getDeclaredField(name);
        found.setAccessible(true);
        return found;
    }

    private static Object field(Object of, String name) throws Exception {
        return place(of.getClass(), name).get(of);
    }

    /** Metadata requests and their bytes, as counted by the broker. */
    private static double[] brokerCounts(MBeanServerConnection broker) throws Exception {
        ObjectName name = new ObjectName("kafka.network:type=RequestMetrics,name=RequestBytes,request=Metadata");
        if (!broker.isRegistered(name)) {
            return new double[] {0, 0};
        }
        double count = ((Number) broker.getAttribute(name, "Count")).doubleValue();
        return new double[] {count, count * ((Number) broker.getAttribute(name, "Mean")).doubleValue()};
    }

    private static double peakMib() throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith("VmHWM:")) {
                return Double.parseDouble(line.replaceAll("[^0-9]", "")) / 1024;
            }
        }
        return 0;
    }
}
