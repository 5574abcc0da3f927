import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;

import org.apache.kafka.common.memory.MemoryPool;
import org.apache.kafka.common.utils.BufferSupplier;
import org.apache.kafka.common.utils.LogContext;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.image.MetadataDelta;
import org.apache.kafka.image.MetadataImage;
import org.apache.kafka.image.MetadataProvenance;
import org.apache.kafka.image.writer.ImageWriterOptions;
import org.apache.kafka.image.writer.RaftSnapshotWriter;
import org.apache.kafka.metadata.MetadataRecordSerde;
import org.apache.kafka.raft.Batch;
import org.apache.kafka.server.common.ApiMessageAndVersion;
import org.apache.kafka.server.common.KRaftVersion;
import org.apache.kafka.server.common.OffsetAndEpoch;
import org.apache.kafka.snapshot.FileRawSnapshotReader;
import org.apache.kafka.snapshot.FileRawSnapshotWriter;
import org.apache.kafka.snapshot.RecordsSnapshotReader;
import org.apache.kafka.snapshot.RecordsSnapshotWriter;
import org.apache.kafka.snapshot.Snapshots;

/**
 * Loads a snapshot of kipmesh with Apache Kafka's own classes, and writes its image as a snapshot.
 *
 * Arguments: directory, end offset and epoch of the snapshot, output directory, number of rounds. Prints one JSON object
 * per round. The first round includes the warm-up of the JVM. The heap of an image is the difference of the heap after
 * garbage collections with and without the image.
 */
public final class KafkaSnapshot {
    private static final int BATCH_BYTES_MAX = 8 << 20;
    private static final int BATCH_RECORDS_MAX = 1024;

    private static long records;

    private KafkaSnapshot() {
    }

    public static void main(String[] given) throws Exception {
        Path folder = Path.of(given[0]);
        OffsetAndEpoch id = new OffsetAndEpoch(Long.parseLong(given[1]), Integer.parseInt(given[2]));
        Path own = Path.of(given[3]);
        int rounds = Integer.parseInt(given[4]);
        for (int round = 0; round < rounds; round++) {
            measure(folder, id, own, new OffsetAndEpoch(id.offset() + round, id.epoch()));
        }
    }

    /** Runs one round, and leaves no objects on the heap. */
    private static void measure(Path folder, OffsetAndEpoch id, Path own, OffsetAndEpoch made) throws Exception {
        long before = usedBytes();
        long begin = System.nanoTime();
        MetadataImage image = load(folder, id);
        double loadSeconds = secondsSince(begin);
        long imageBytes = usedBytes() - before;
        begin = System.nanoTime();
        generate(own, made, image);
        double generateSeconds = secondsSince(begin);
        Path file = Snapshots.snapshotPath(own, made);
        System.out.printf(
            Locale.ROOT,
            "{\"load_s\": %.4f, \"generate_s\": %.4f, \"bytes\": %d, \"records\": %d, \"topics\": %d, \"image_mib\": %.4f}%n",
            loadSeconds, generateSeconds, Files.size(file), records, image.topics().topicsById().size(),
            (double) imageBytes / (1 << 20));
        Files.delete(file);
    }

    private static long usedBytes() {
        System.gc();
        Runtime runtime = Runtime.getRuntime();
        return runtime.totalMemory() - runtime.freeMemory();
    }

    private static double secondsSince(long begin) {
        return (System.nanoTime() - begin) / 1e9;
    }

    private static MetadataImage load(Path folder, OffsetAndEpoch id) throws Exception {
        records = 0;
        MetadataDelta delta = new MetadataDelta(MetadataImage.EMPTY);
        FileRawSnapshotReader file = FileRawSnapshotReader.open(folder, id);
        try (RecordsSnapshotReader<ApiMessageAndVersion> reader = RecordsSnapshotReader.of(
                file, new MetadataRecordSerde(), BufferSupplier.create(), BATCH_BYTES_MAX, true, new LogContext(""))) {
            while (reader.hasNext()) {
                Batch<ApiMessageAndVersion> batch = reader.next();
                for (ApiMessageAndVersion record : batch.records()) {
                    delta.replay(record.message());
                    records++;
                }
            }
        }
        return delta.apply(new MetadataProvenance(id.offset() - 1, id.epoch(), 1, true));
    }

    private static void generate(Path folder, OffsetAndEpoch id, MetadataImage image) {
        RecordsSnapshotWriter<ApiMessageAndVersion> writer = new RecordsSnapshotWriter.Builder()
            .setTime(Time.SYSTEM)
            .setMaxBatchSize(BATCH_BYTES_MAX)
            .setMemoryPool(MemoryPool.NONE)
            .setLastContainedLogTimestamp(1)
            .setKraftVersion(KRaftVersion.KRAFT_VERSION_0)
            .setRawSnapshotWriter(FileRawSnapshotWriter.create(folder, id))
            .build(new MetadataRecordSerde());
        RaftSnapshotWriter target = new RaftSnapshotWriter(writer, BATCH_RECORDS_MAX);
        ImageWriterOptions options = new ImageWriterOptions.Builder(image.features().metadataVersionOrThrow()).build();
        image.write(target, options);
        target.close(true);
    }
}
