package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.done;

import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Materialized;

/** A Streams application that counts words exactly once, and what writes its lines. */
public final class WordCount {
    private final Clients clients;
    private CompletableFuture<Integer> writing;
    private volatile boolean stopping;

    WordCount(Clients clients) {
        this.clients = clients;
    }

    /** Write these lines, over and over, each acknowledged before the next, until {@code stopWriting}. */
    public Object startWriting(Arguments arguments) {
        List<String> lines = arguments.texts("lines");
        writing =
                CompletableFuture.supplyAsync(
                        () -> {
                            int written = 0;
                            try (KafkaProducer<byte[], byte[]> producer = clients.producer(Map.of("acks", "all"))) {
                                for (; !stopping; written++) {
                                    byte[] line = bytes(lines.get(written % lines.size()));
                                    done(producer.send(new ProducerRecord<>(arguments.text("topic"), line)));
                                }
                            } catch (Exception error) {
                                throw new CompletionException(error);
                            }
                            return written;
                        });
        return null;
    }

    /** How many lines were written. */
    public int stopWriting(Arguments arguments) throws Exception {
        stopping = true;
        return done(writing);
    }

    /** The last stable offset, over all partitions: it shows how far an application has come. */
    public long committedEnd(Arguments arguments) {
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of("isolation.level", "read_committed"))) {
            List<TopicPartition> places =
                    consumer.partitionsFor(arguments.text("topic")).stream()
                            .map(each -> new TopicPartition(each.topic(), each.partition()))
                            .toList();
            return consumer.endOffsets(places).values().stream().mapToLong(Long::longValue).sum();
        }
    }

    /**
     * Count the words of {@code source}: every count that a word reaches goes to {@code target} as {@code word=count}.
     * It runs until the process ends.
     */
    public Object startWordCount(Arguments arguments) {
        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream(arguments.text("source"))
                .flatMapValues(line -> Arrays.asList(line.split(" ")))
                .groupBy((key, word) -> word)
                .count(Materialized.as("counts"))
                .toStream()
                .mapValues((word, count) -> word + "=" + count)
                .to(arguments.text("target"));
        Properties properties = new Properties();
        properties.putAll(configs(arguments));
        KafkaStreams streams = new KafkaStreams(builder.build(), properties);
        // A thread whose producer was fenced while the node was away is replaced.
        streams.setUncaughtExceptionHandler(error -> StreamThreadExceptionResponse.REPLACE_THREAD);
        streams.start();
        return null;
    }

    private Map<String, Object> configs(Arguments arguments) {
        Map<String, Object> configs = new HashMap<>(clients.base());
        configs.put("application.id", arguments.text("application"));
        configs.put("processing.guarantee", "exactly_once_v2");
        configs.put("state.dir", arguments.text("state_dir"));
        configs.put("commit.interval.ms", 50);
        // Every count is sent on, so that the output shows each word of the input.
        configs.put("statestore.cache.max.bytes", 0);
        configs.put("default.key.serde", Serdes.StringSerde.class);
        configs.put("default.value.serde", Serdes.StringSerde.class);
        configs.put("consumer.auto.offset.reset", "earliest");
        configs.put("consumer.session.timeout.ms", 3_000);
        configs.put("consumer.heartbeat.interval.ms", 300);
        // What a killed application has left open is aborted this soon.
        configs.put("producer.transaction.timeout.ms", 5_000);
        return configs;
    }
}
