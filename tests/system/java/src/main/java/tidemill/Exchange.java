package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.text;
import static tidemill.Clients.until;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;

/** Writing and reading at the same time while a cluster changes; clients/exchange.py says how. */
public final class Exchange {
    private static final int PAUSE_MS = 10;

    private final Clients clients;
    private KafkaProducer<byte[], byte[]> producer;
    private KafkaConsumer<byte[], byte[]> consumer;
    private String topic;
    private int partitions;
    private int written;
    private int[] read;

    Exchange(Clients clients) {
        this.clients = clients;
    }

    public Object startExchange(Arguments arguments) {
        topic = arguments.text("topic");
        partitions = arguments.number("partitions");
        written = 0;
        read = new int[partitions];
        Map<String, Object> configs = Map.of("request.timeout.ms", 10_000, "metadata.max.age.ms", 1_000);
        producer = clients.producer(configs);
        consumer = clients.consumer(configs);
        List<TopicPartition> places = new ArrayList<>();
        for (int partition = 0; partition < partitions; partition++) {
            places.add(new TopicPartition(topic, partition));
        }
        consumer.assign(places);
        consumer.seekToBeginning(places);
        return null;
    }

    public Object exchange(Arguments arguments) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int count = arguments.number("count"); count > 0; count--) {
            written++;
            sent.add(producer.send(new ProducerRecord<>(topic, written % partitions, null, bytes("" + written))));
            Thread.sleep(PAUSE_MS);
        }
        for (Future<RecordMetadata> each : sent) {
            done(each);
        }
        until(
                () -> {
                    consumer.poll(Duration.ofMillis(100)).forEach(this::note);
                    int all = 0;
                    for (int count : read) {
                        all += count;
                    }
                    return all == written;
                },
                "everything is read");
        return null;
    }

    private void note(ConsumerRecord<byte[], byte[]> record) {
        int partition = record.partition();
        int wanted = read[partition]++ * partitions + (partition == 0 ? partitions : partition);
        checkEqual(text(record.value()), "" + wanted);
    }
}
