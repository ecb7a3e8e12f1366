package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.check;
import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.numbered;
import static tidemill.Clients.outcome;
import static tidemill.Clients.take;
import static tidemill.Clients.texts;
import static tidemill.Clients.until;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;

/** Producing and consuming, without groups. */
public final class Records {
    private final Clients clients;

    Records(Clients clients) {
        this.clients = clients;
    }

    public Object everyCodecWithEveryAcks(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        String codec = arguments.text("codec");
        clients.create(topic);
        List<String> sent = new ArrayList<>();
        for (String acks : List.of("0", "1", "all")) {
            List<String> batch = numbered(codec + " " + acks + " " + "ebb and flow ".repeat(20), 0, 50);
            Map<String, Object> configs =
                    Map.of("acks", acks, "compression.type", codec, "linger.ms", 50, "enable.idempotence", acks.equals("all"));
            List<RecordMetadata> reports = clients.produce(topic, batch, configs);
            if (!acks.equals("0")) {
                checkEqual(reports.get(49).offset(), sent.size() + 49L);
            }
            sent.addAll(batch);
            // Without acknowledgements only the reader can tell that all of it has arrived.
            checkEqual(clients.readTexts(topic, sent.size()), sent);
        }
        return null;
    }

    public Object idempotentProducerWritesEverythingOnceAndInOrder(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 3, Map.of());
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int number = 0; number < 3_000; number++) {
            records.add(new ProducerRecord<>(topic, number % 3, null, bytes("v" + number)));
        }
        clients.send(records, Map.of("enable.idempotence", true, "acks", "all", "batch.size", 500));
        for (int partition = 0; partition < 3; partition++) {
            List<String> wanted = new ArrayList<>();
            for (int number = partition; number < 3_000; number += 3) {
                wanted.add("v" + number);
            }
            TopicPartition place = new TopicPartition(topic, partition);
            checkEqual(texts(clients.read(place, 0, 1_000, Map.of())), wanted);
            checkEqual(bounds(place), List.of(0L, 1_000L));
        }
        return null;
    }

    public Object keysHeadersNullValuesAndTimestampsSurvive(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 1, Map.of("retention.ms", "-1"));
        List<Header> two = List.of(new RecordHeader("a", bytes("1")), new RecordHeader("a", bytes("2")));
        List<Header> odd = List.of(new RecordHeader("é", new byte[] {0}), new RecordHeader("none", (byte[]) null));
        byte[] binary = {0, (byte) 0xff, (byte) 0x80};
        clients.send(
                List.of(
                        new ProducerRecord<>(topic, 0, 1_000L, bytes("k"), bytes("v"), two),
                        new ProducerRecord<>(topic, 0, 2_000L, bytes("k"), bytes(null)),
                        new ProducerRecord<>(topic, 0, 3_000L, null, new byte[0]),
                        new ProducerRecord<>(topic, 0, 4_000L, binary, binary, odd)),
                Map.of());
        List<ConsumerRecord<byte[], byte[]>> read = clients.read(new TopicPartition(topic, 0), 0, 4, Map.of());
        checkEqual(texts(read).subList(0, 3), Arrays.asList("v", null, ""));
        checkEqual(read.get(2).key(), null);
        checkEqual(Arrays.asList(read.get(0).headers().toArray()), two);
        checkEqual(Arrays.asList(read.get(3).headers().toArray()), odd);
        check(Arrays.equals(read.get(3).key(), binary) && Arrays.equals(read.get(3).value(), binary), read.get(3));
        for (int number = 0; number < 4; number++) {
            checkEqual(read.get(number).timestamp(), 1_000L * (number + 1));
            checkEqual(read.get(number).timestampType(), TimestampType.CREATE_TIME);
        }
        return null;
    }

    public Object largeMessagesUpToTheTopicsLimit(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 1, Map.of("max.message.bytes", "3000000"));
        byte[] fits = new byte[2_900_000];
        new Random(1).nextBytes(fits);
        byte[] tooLarge = new byte[3_100_000];
        new Random(2).nextBytes(tooLarge);
        Map<String, Object> configs = Map.of("max.request.size", 10_000_000);
        try (KafkaProducer<byte[], byte[]> producer = clients.producer(configs)) {
            done(producer.send(new ProducerRecord<>(topic, fits)));
            Future<RecordMetadata> refused = producer.send(new ProducerRecord<>(topic, tooLarge));
            checkEqual(outcome(() -> done(refused)), "RecordTooLargeException");
            done(producer.send(new ProducerRecord<>(topic, bytes("after"))));
        }
        Map<String, Object> small = Map.of("max.partition.fetch.bytes", 100_000);
        List<ConsumerRecord<byte[], byte[]>> read = clients.read(new TopicPartition(topic, 0), 0, 2, small);
        check(Arrays.equals(read.get(0).value(), fits), "other bytes");
        checkEqual(texts(read).get(1), "after");
        return null;
    }

    public Object readingFromTheBeginningTheEndAndAnOffset(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic);
        clients.produce(topic, numbered("old", 0, 10), Map.of());
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of())) {
            consumer.assign(List.of(place));
            consumer.seekToBeginning(List.of(place));
            checkEqual(texts(take(consumer, 10)), numbered("old", 0, 10));
            consumer.seek(place, 7);
            checkEqual(texts(take(consumer, 3)), numbered("old", 7, 10));
            consumer.seek(place, 0);
            consumer.seekToEnd(List.of(place));
            checkEqual(consumer.position(place), 10L);
            clients.produce(topic, List.of("new"), Map.of());
            checkEqual(texts(take(consumer, 1)), List.of("new"));
        }
        return null;
    }

    public Object offsetsAreFoundByTime(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic, 1, Map.of("retention.ms", "-1"));
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int number = 0; number < 20; number++) {
            records.add(new ProducerRecord<>(topic, 0, 1_000L * (number + 1), null, bytes("v")));
        }
        clients.send(records, Map.of());
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of())) {
            List<Long> found = new ArrayList<>();
            for (long time : List.of(0L, 5_000L, 5_001L, 30_000L)) {
                OffsetAndTimestamp at = consumer.offsetsForTimes(Map.of(place, time)).get(place);
                found.add(at == null ? null : at.offset());
            }
            checkEqual(found, Arrays.asList(0L, 4L, 5L, null));
        }
        return null;
    }

    public Object anOffsetOutOfRangeIsResetOrReported(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic);
        clients.produce(topic, List.of("a", "b", "c"), Map.of());
        done(clients.admin().deleteRecords(Map.of(place, RecordsToDelete.beforeOffset(2))).all());
        checkEqual(texts(clients.read(place, 0, 1, Map.of())), List.of("c"));
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of("auto.offset.reset", "none"))) {
            consumer.assign(List.of(place));
            consumer.seek(place, 0);
            try {
                take(consumer, 1);
                throw new AssertionError("no exception");
            } catch (OffsetOutOfRangeException expected) {
                checkEqual(expected.offsetOutOfRangePartitions(), Map.of(place, 0L));
            }
        }
        return null;
    }

    public Object readingPausesResumesAndSeeks(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        List<TopicPartition> both = List.of(new TopicPartition(topic, 0), new TopicPartition(topic, 1));
        clients.create(topic, 2, Map.of());
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (TopicPartition place : both) {
            for (String text : numbered("p" + place.partition() + " ", 0, 5)) {
                records.add(new ProducerRecord<>(topic, place.partition(), null, bytes(text)));
            }
        }
        clients.send(records, Map.of());
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of())) {
            consumer.assign(both);
            consumer.pause(both.subList(0, 1));
            checkEqual(texts(take(consumer, 5)), numbered("p1 ", 0, 5));
            consumer.resume(both.subList(0, 1));
            checkEqual(texts(take(consumer, 5)), numbered("p0 ", 0, 5));
            consumer.seek(both.get(0), 3);
            checkEqual(texts(take(consumer, 2)), numbered("p0 ", 3, 5));
            checkEqual(Set.of(consumer.position(both.get(0)), consumer.position(both.get(1)) + 10), Set.of(5L, 15L));
        }
        return null;
    }

    // --- topics

    public Object batchesAreStoredWithTheTopicsCodec(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 1, Map.of("compression.type", arguments.text("codec")));
        List<String> sent = numbered("high water ".repeat(30), 0, 100);
        clients.produce(topic, sent, Map.of("compression.type", "gzip", "linger.ms", 100));
        clients.produce(topic, sent, Map.of("compression.type", "none", "linger.ms", 100));
        List<String> twice = new ArrayList<>(sent);
        twice.addAll(sent);
        checkEqual(clients.readTexts(topic, 200), twice);
        return null;
    }

    public Object theAppendTimeReplacesTheProducers(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 1, Map.of("message.timestamp.type", "LogAppendTime"));
        long before = System.currentTimeMillis();
        RecordMetadata report = clients.send(List.of(new ProducerRecord<>(topic, 0, 1_000L, null, bytes("v"))), Map.of()).get(0);
        ConsumerRecord<byte[], byte[]> record = clients.read(new TopicPartition(topic, 0), 0, 1, Map.of()).get(0);
        checkEqual(record.timestampType(), TimestampType.LOG_APPEND_TIME);
        check(before <= record.timestamp() && record.timestamp() <= System.currentTimeMillis(), record);
        checkEqual(report.timestamp(), record.timestamp());
        return null;
    }

    public Object aMissingTopicIsCreatedByWriting(Arguments arguments) throws Exception {
        RecordMetadata report = clients.send(List.of(new ProducerRecord<>(arguments.text("topic"), bytes("v"))), Map.of()).get(0);
        checkEqual(List.of((long) report.partition(), report.offset()), List.of(0L, 0L));
        return null;
    }

    /** Against the node in {@code servers}, which creates no topics by itself. */
    public Object aMissingTopicIsAnError(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Clients strict = new Clients(arguments.text("servers"));
        try (KafkaProducer<byte[], byte[]> producer = strict.producer(Map.of("max.block.ms", 1_000))) {
            Future<RecordMetadata> sent = producer.send(new ProducerRecord<>(topic, bytes("v")));
            checkEqual(outcome(() -> done(sent)), "TimeoutException");
        }
        checkEqual(
                Clients.refusal(strict.admin().describeTopics(List.of(topic)).allTopicNames()),
                "UnknownTopicOrPartitionException");
        check(!done(strict.admin().listTopics().names()).contains(topic), topic);
        strict.admin().close();
        return null;
    }

    // --- deletion of old data

    public Object retentionBySizeMovesTheStart(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic, 1, Map.of("internal.segment.bytes", "2000"));
        List<String> sent = numbered("x".repeat(500), 0, 30);
        clients.produce(topic, sent, Map.of("batch.size", 0));
        // Only now, so that one look at the log decides what goes.
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        AlterConfigOp limit = new AlterConfigOp(new ConfigEntry("retention.bytes", "6000"), AlterConfigOp.OpType.SET);
        done(clients.admin().incrementalAlterConfigs(Map.of(resource, List.of(limit))).all());
        until(() -> bounds(place).get(0) > 0, "the start moves");
        int low = bounds(place).get(0).intValue();
        checkEqual(texts(clients.read(place, low, 30 - low, Map.of())), sent.subList(low, 30));
        check(30 - low >= 6, low);
        return null;
    }

    public Object retentionByTimeEmptiesTheTopic(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic, 1, Map.of("retention.ms", "60000"));
        clients.send(List.of(new ProducerRecord<>(topic, 0, 1_000L, null, bytes("old"))), Map.of());
        until(() -> bounds(place).equals(List.of(1L, 1L)), "the old record is gone");
        clients.produce(topic, List.of("new"), Map.of());
        checkEqual(texts(clients.read(place, 1, 1, Map.of())), List.of("new"));
        return null;
    }

    public Object recordsAreDeletedUpToAnOffset(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        clients.create(topic);
        clients.produce(topic, List.of("a", "b", "c"), Map.of());
        checkEqual(deleted(place, 2), 2L);
        checkEqual(bounds(place), List.of(2L, 3L));
        checkEqual(
                outcome(() -> deleted(place, 9)),
                "OffsetOutOfRangeException");
        checkEqual(deleted(place, -1), 3L);
        return null;
    }

    private long deleted(TopicPartition place, long before) throws Exception {
        Map<TopicPartition, RecordsToDelete> wanted = Map.of(place, RecordsToDelete.beforeOffset(before));
        return done(clients.admin().deleteRecords(wanted).lowWatermarks().get(place)).lowWatermark();
    }

    /** Log start and end of a partition. */
    private List<Long> bounds(TopicPartition place) {
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of())) {
            Duration deadline = Clients.DEADLINE;
            return List.of(
                    consumer.beginningOffsets(List.of(place), deadline).get(place),
                    consumer.endOffsets(List.of(place), deadline).get(place));
        }
    }
}
