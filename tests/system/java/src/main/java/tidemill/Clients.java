package tidemill;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Clients with the settings that all scenarios share, and what is done with them again and again. */
final class Clients {
    static final Duration DEADLINE = Duration.ofSeconds(60);

    private final String servers;
    private Admin admin;

    Clients(String servers) {
        this.servers = servers;
    }

    /** A step that may throw anything. */
    interface Step {
        void run() throws Exception;
    }

    Map<String, Object> base() {
        Map<String, Object> configs = new HashMap<>();
        configs.put("bootstrap.servers", servers);
        configs.put("reconnect.backoff.max.ms", 200);
        return configs;
    }

    synchronized Admin admin() {
        if (admin == null) {
            admin = Admin.create(base());
        }
        return admin;
    }

    KafkaProducer<byte[], byte[]> producer(Map<String, ?> configs) {
        Map<String, Object> all = base();
        all.put("linger.ms", 0);
        all.putAll(configs);
        return new KafkaProducer<>(all, new ByteArraySerializer(), new ByteArraySerializer());
    }

    KafkaConsumer<byte[], byte[]> consumer(Map<String, ?> configs) {
        Map<String, Object> all = base();
        all.put("enable.auto.commit", false);
        all.put("auto.offset.reset", "earliest");
        all.putAll(configs);
        return new KafkaConsumer<>(all, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    // --- topics, records

    void create(String topic, int partitions, Map<String, String> configs) throws Exception {
        done(admin().createTopics(List.of(new NewTopic(topic, partitions, (short) 1).configs(configs))).all());
    }

    void create(String topic) throws Exception {
        create(topic, 1, Map.of());
    }

    /** Send values to partition 0 and wait for their acknowledgements. */
    List<RecordMetadata> produce(String topic, List<String> texts, Map<String, ?> configs) throws Exception {
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        texts.forEach(text -> records.add(new ProducerRecord<>(topic, 0, null, bytes(text))));
        return send(records, configs);
    }

    List<RecordMetadata> send(List<ProducerRecord<byte[], byte[]>> records, Map<String, ?> configs) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<RecordMetadata> found = new ArrayList<>();
        try (KafkaProducer<byte[], byte[]> producer = producer(configs)) {
            records.forEach(record -> sent.add(producer.send(record)));
            producer.flush();
            for (Future<RecordMetadata> each : sent) {
                found.add(done(each));
            }
        }
        return found;
    }

    /** The first records of a partition from an offset on. */
    List<ConsumerRecord<byte[], byte[]>> read(TopicPartition place, long offset, int count, Map<String, ?> configs) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(configs)) {
            consumer.assign(List.of(place));
            consumer.seek(place, offset);
            return take(consumer, count);
        }
    }

    List<String> readTexts(String topic, int count) {
        return texts(read(new TopicPartition(topic, 0), 0, count, Map.of()));
    }

    static List<ConsumerRecord<byte[], byte[]>> take(KafkaConsumer<byte[], byte[]> consumer, int count) {
        List<ConsumerRecord<byte[], byte[]>> taken = new ArrayList<>();
        until(
                () -> {
                    consumer.poll(Duration.ofMillis(200)).forEach(taken::add);
                    return taken.size() >= count;
                },
                count + " records");
        return taken;
    }

    static byte[] bytes(String text) {
        return text == null ? null : text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] bytes) {
        return bytes == null ? null : new String(bytes, StandardCharsets.UTF_8);
    }

    static List<String> texts(List<ConsumerRecord<byte[], byte[]>> records) {
        List<String> found = new ArrayList<>();
        records.forEach(record -> found.add(text(record.value())));
        return found;
    }

    /** {@code prefix + start} to {@code prefix + (end - 1)}. */
    static List<String> numbered(String prefix, int start, int end) {
        List<String> found = new ArrayList<>();
        for (int number = start; number < end; number++) {
            found.add(prefix + number);
        }
        return found;
    }

    // --- outcomes

    static <T> T done(Future<T> future) throws Exception {
        try {
            return future.get(DEADLINE.toMillis(), TimeUnit.MILLISECONDS);
        } catch (ExecutionException error) {
            throw error.getCause() instanceof Exception cause ? cause : error;
        }
    }

    /** The name of the exception that a step ends with, else "ok". */
    static String outcome(Step step) {
        try {
            step.run();
            return "ok";
        } catch (Exception error) {
            return error.getClass().getSimpleName();
        }
    }

    static String refusal(KafkaFuture<?> future) {
        return outcome(() -> done(future));
    }

    static void check(boolean holds, Object found) {
        if (!holds) {
            throw new AssertionError("found " + found);
        }
    }

    static void checkEqual(Object found, Object wanted) {
        if (!Objects.equals(found, wanted)) {
            throw new AssertionError("found " + found + ", wanted " + wanted);
        }
    }

    /** Ask until the condition holds. */
    static void until(BooleanSupplier condition, String what) {
        long deadline = System.nanoTime() + DEADLINE.toNanos();
        while (!condition.getAsBoolean()) {
            if (System.nanoTime() > deadline) {
                throw new AssertionError("after " + DEADLINE.toSeconds() + " s still not: " + what);
            }
            pause();
        }
    }

    private static void pause() {
        try {
            Thread.sleep(20);
        } catch (InterruptedException error) {
            throw new AssertionError(error);
        }
    }
}
