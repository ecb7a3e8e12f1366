package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.outcome;
import static tidemill.Clients.text;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;

/** Named transactional producers, driven step by step as {@code test_transactions.py} does it. */
public final class Transactions {
    private static final int NOTHING_COMMITTED = -1001;

    private final Clients clients;
    private final Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();

    Transactions(Clients clients) {
        this.clients = clients;
    }

    public Object create(Arguments arguments) throws Exception {
        clients.create(arguments.text("topic"), arguments.number("partitions"), Map.of());
        return null;
    }

    public String start(Arguments arguments) {
        KafkaProducer<byte[], byte[]> producer =
                clients.producer(
                        Map.of(
                                "transactional.id", arguments.text("transactional_id"),
                                "transaction.timeout.ms", arguments.number("timeout_ms", 60_000),
                                "request.timeout.ms", 10_000,
                                "delivery.timeout.ms", 30_000,
                                "max.block.ms", 40_000));
        KafkaProducer<byte[], byte[]> before = producers.put(arguments.text("name"), producer);
        if (before != null) {
            before.close(Duration.ZERO);
        }
        return outcome(producer::initTransactions);
    }

    public String begin(Arguments arguments) {
        return outcome(() -> producer(arguments).beginTransaction());
    }

    /** Write, and wait for the acknowledgements. */
    public String send(Arguments arguments) {
        return outcome(
                () -> {
                    List<Future<RecordMetadata>> sent = new ArrayList<>();
                    for (String text : arguments.texts("texts")) {
                        int partition = arguments.number("partition", 0);
                        sent.add(producer(arguments).send(new ProducerRecord<>(arguments.text("topic"), partition, null, bytes(text))));
                    }
                    for (Future<RecordMetadata> each : sent) {
                        done(each);
                    }
                });
    }

    public String sendOffsets(Arguments arguments) {
        TopicPartition place = new TopicPartition(arguments.text("topic"), 0);
        Map<TopicPartition, OffsetAndMetadata> offsets = Map.of(place, new OffsetAndMetadata(arguments.number("offset")));
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of("group.id", arguments.text("group")))) {
            return outcome(() -> producer(arguments).sendOffsetsToTransaction(offsets, consumer.groupMetadata()));
        }
    }

    public String commit(Arguments arguments) {
        return outcome(() -> producer(arguments).commitTransaction());
    }

    public String abort(Arguments arguments) {
        return outcome(() -> producer(arguments).abortTransaction());
    }

    public Object writePlain(Arguments arguments) throws Exception {
        clients.produce(arguments.text("topic"), arguments.texts("texts"), Map.of());
        return null;
    }

    /** Everything up to the end that this isolation level sees. */
    public List<String> read(Arguments arguments) {
        TopicPartition place = new TopicPartition(arguments.text("topic"), arguments.number("partition", 0));
        List<String> found = new ArrayList<>();
        Map<String, Object> configs = Map.of("isolation.level", arguments.text("level"));
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(configs)) {
            consumer.assign(List.of(place));
            consumer.seekToBeginning(List.of(place));
            long end = consumer.endOffsets(List.of(place)).get(place);
            Clients.until(
                    () -> {
                        if (consumer.position(place) < end) {
                            consumer.poll(Duration.ofMillis(200)).forEach(record -> found.add(text(record.value())));
                        }
                        return consumer.position(place) >= end;
                    },
                    "offset " + end);
        }
        return found;
    }

    public long committed(Arguments arguments) {
        TopicPartition place = new TopicPartition(arguments.text("topic"), 0);
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of("group.id", arguments.text("group")))) {
            OffsetAndMetadata found = consumer.committed(Set.of(place)).get(place);
            return found == null ? NOTHING_COMMITTED : found.offset();
        }
    }

    // --- transactions as an admin client sees them

    /** State, epoch and partitions of a transactional id. */
    public Object describe(Arguments arguments) throws Exception {
        String id = arguments.text("transactional_id");
        TransactionDescription found = done(clients.admin().describeTransactions(List.of(id)).all()).get(id);
        return Map.of(
                "state", found.state().toString(),
                "epoch", found.producerEpoch(),
                "partitions", found.topicPartitions().stream().map(TopicPartition::toString).sorted().toList());
    }

    public Object openTransactionsAreListedAndProducersDescribed(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        Admin admin = clients.admin();
        clients.create(topic);
        try (KafkaProducer<byte[], byte[]> producer = clients.producer(Map.of("transactional.id", topic))) {
            producer.initTransactions();
            producer.beginTransaction();
            done(producer.send(new ProducerRecord<>(topic, 0, null, bytes("x"))));
            checkEqual(stateOf(topic), TransactionState.ONGOING);
            ProducerState state = producerState(place);
            checkEqual(state.currentTransactionStartOffset().getAsLong(), 0L);
            producer.commitTransaction();
            checkEqual(stateOf(topic), TransactionState.COMPLETE_COMMIT);
            checkEqual(producerState(place).currentTransactionStartOffset().isPresent(), false);
        }
        return null;
    }

    public Object aFencedProducerCannotCommit(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic);
        try (KafkaProducer<byte[], byte[]> producer = clients.producer(Map.of("transactional.id", topic))) {
            producer.initTransactions();
            producer.beginTransaction();
            done(producer.send(new ProducerRecord<>(topic, 0, null, bytes("x"))));
            done(clients.admin().fenceProducers(List.of(topic)).all());
            checkEqual(outcome(producer::commitTransaction), arguments.text("error"));
        }
        return null;
    }

    private TransactionState stateOf(String transactionalId) throws Exception {
        return done(clients.admin().listTransactions().all()).stream()
                .filter(each -> each.transactionalId().equals(transactionalId))
                .findFirst()
                .orElseThrow()
                .state();
    }

    private ProducerState producerState(TopicPartition place) throws Exception {
        return done(clients.admin().describeProducers(List.of(place)).partitionResult(place)).activeProducers().get(0);
    }

    private KafkaProducer<byte[], byte[]> producer(Arguments arguments) {
        return producers.get(arguments.text("name"));
    }
}
