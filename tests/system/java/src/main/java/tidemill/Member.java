package tidemill;

import static tidemill.Clients.text;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/** A member of a group, polling in a thread of its own until it is told to leave. */
final class Member implements ConsumerRebalanceListener {
    private final KafkaConsumer<byte[], byte[]> consumer;
    private final Thread thread = new Thread(this::poll);
    private volatile boolean leaving;

    // Guarded by this.
    private final Set<Integer> assigned = new TreeSet<>();
    private final List<String> values = new ArrayList<>();
    private int rebalances;
    private Exception failure;

    Member(Clients clients, String group, String topic, Map<String, Object> configs) {
        Map<String, Object> all = new HashMap<>();
        all.put("group.id", group);
        all.put("enable.auto.commit", true);
        if (!"consumer".equals(configs.get("group.protocol"))) {
            // In the new protocol these are the server's to say.
            all.put("session.timeout.ms", 45_000);
            all.put("heartbeat.interval.ms", 200);
        }
        all.putAll(configs);
        consumer = clients.consumer(all);
        consumer.subscribe(List.of(topic), this);
        thread.setDaemon(true);
        thread.start();
    }

    /** Wait for that many partitions (-1: any) and at least that many values. */
    synchronized Map<String, Object> await(int partitions, int count) throws InterruptedException {
        long deadline = System.nanoTime() + Clients.DEADLINE.toNanos();
        while (failure == null && !((partitions < 0 || assigned.size() == partitions) && values.size() >= count)) {
            long left = (deadline - System.nanoTime()) / 1_000_000;
            if (left <= 0) {
                throw new AssertionError("wanted " + partitions + " partitions and " + count + " values: " + seen());
            }
            wait(left);
        }
        if (failure != null) {
            throw new AssertionError(failure);
        }
        return seen();
    }

    void leave() throws InterruptedException {
        leaving = true;
        thread.join();
    }

    private synchronized Map<String, Object> seen() {
        return Map.of(
                "assigned", List.copyOf(assigned), "rebalances", rebalances, "values", values.stream().sorted().toList());
    }

    private void poll() {
        try (consumer) {
            while (!leaving) {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> read(text(record.value())));
            }
        } catch (Exception error) {
            fail(error);
        }
    }

    private synchronized void read(String value) {
        values.add(value);
        notifyAll();
    }

    private synchronized void fail(Exception error) {
        failure = error;
        notifyAll();
    }

    @Override
    public synchronized void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        partitions.forEach(place -> assigned.add(place.partition()));
        note();
    }

    @Override
    public synchronized void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        partitions.forEach(place -> assigned.remove(place.partition()));
        note();
    }

    private void note() {
        rebalances++;
        notifyAll();
    }
}
