package tidemill;

import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.refusal;
import static tidemill.Clients.text;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.ListGroupsOptions;
import org.apache.kafka.clients.admin.ListShareGroupOffsetsSpec;
import org.apache.kafka.clients.admin.ShareGroupDescription;
import org.apache.kafka.clients.admin.SharePartitionOffsetInfo;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** Members of share groups, each polling in a thread of its own until it is told to leave. */
public final class ShareGroups {
    /** Deliveries after which a flaky record is accepted. */
    private static final int ENOUGH_DELIVERIES = 3;

    private final Clients clients;
    private final Map<String, ShareMember> members = new HashMap<>();

    ShareGroups(Clients clients) {
        this.clients = clients;
    }

    public void shareJoin(Arguments arguments) {
        members.put(
                arguments.text("name"),
                new ShareMember(arguments.text("group"), arguments.text("topic"), arguments.text("mode")));
    }

    public List<List<Object>> shareWait(Arguments arguments) throws InterruptedException {
        return members.get(arguments.text("name")).await(arguments.number("deliveries", 0));
    }

    public List<List<Object>> shareLeave(Arguments arguments) throws InterruptedException {
        return members.remove(arguments.text("name")).leave();
    }

    /** An admin client looks at a group that has a member, and is refused what needs an idle one. */
    public Map<String, Object> shareAdminSees(Arguments arguments) throws Exception {
        String group = arguments.text("group");
        TopicPartition partition = new TopicPartition(arguments.text("topic"), 0);
        Admin admin = clients.admin();
        GroupListing listed = null;
        for (GroupListing each : done(admin.listGroups(ListGroupsOptions.forShareGroups()).all())) {
            listed = each.groupId().equals(group) ? each : listed;
        }
        checkEqual(listed.type().orElseThrow(), GroupType.SHARE);
        ShareGroupDescription described = done(admin.describeShareGroups(List.of(group)).all()).get(group);
        Map<TopicPartition, SharePartitionOffsetInfo> offsets = offsets(admin, group);
        String notEmpty = "GroupNotEmptyException";
        checkEqual(refusal(admin.alterShareGroupOffsets(group, Map.of(partition, 0L)).all()), notEmpty);
        checkEqual(refusal(admin.deleteShareGroupOffsets(group, Set.of(partition.topic())).all()), notEmpty);
        checkEqual(refusal(admin.deleteShareGroups(List.of(group)).all()), notEmpty);
        return Map.of(
                "state", described.groupState().toString(),
                "members", described.members().size(),
                "assigned", described.members().iterator().next().assignment().topicPartitions().size(),
                "start", offsets.get(partition).startOffset(),
                "lag", offsets.get(partition).lag().orElse(-1L));
    }

    /** Moves a group without members; gives where it starts then, and its lag. */
    public List<Object> shareAdminMoves(Arguments arguments) throws Exception {
        String group = arguments.text("group");
        TopicPartition partition = new TopicPartition(arguments.text("topic"), 0);
        Admin admin = clients.admin();
        long offset = arguments.number("offset");
        done(admin.alterShareGroupOffsets(group, Map.of(partition, offset)).all());
        SharePartitionOffsetInfo found = offsets(admin, group).get(partition);
        return List.of(found.startOffset(), found.lag().orElse(-1L));
    }

    /** Deletes what a group without members knows of a topic, then the group. */
    public String shareAdminDeletes(Arguments arguments) throws Exception {
        String group = arguments.text("group");
        Admin admin = clients.admin();
        done(admin.deleteShareGroupOffsets(group, Set.of(arguments.text("topic"))).all());
        checkEqual(offsets(admin, group), Map.of());
        done(admin.deleteShareGroups(List.of(group)).all());
        return refusal(admin.describeShareGroups(List.of(group)).all());
    }

    private static Map<TopicPartition, SharePartitionOffsetInfo> offsets(Admin admin, String group) throws Exception {
        return done(
                admin.listShareGroupOffsets(Map.of(group, new ListShareGroupOffsetsSpec()))
                        .partitionsToOffsetInfo(group));
    }

    private final class ShareMember {
        private final KafkaShareConsumer<byte[], byte[]> consumer;
        private final boolean isExplicit;
        private final Thread thread = new Thread(this::poll);
        private volatile boolean leaving;

        // Guarded by this.
        private final List<List<Object>> deliveries = new ArrayList<>();
        private Exception failure;

        ShareMember(String group, String topic, String mode) {
            Map<String, Object> configs = clients.base();
            configs.put("group.id", group);
            configs.put("share.acknowledgement.mode", mode);
            isExplicit = mode.equals("explicit");
            consumer = new KafkaShareConsumer<>(configs, new ByteArrayDeserializer(), new ByteArrayDeserializer());
            consumer.subscribe(List.of(topic));
            thread.setDaemon(true);
            thread.start();
        }

        private void poll() {
            try (consumer) {
                while (!leaving) {
                    List<List<Object>> outcomes = new ArrayList<>();
                    for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofMillis(200))) {
                        outcomes.add(settle(each));
                    }
                    if (!outcomes.isEmpty()) {
                        Map<TopicIdPartition, Optional<KafkaException>> errors = consumer.commitSync();
                        for (Optional<KafkaException> error : errors.values()) {
                            if (error.isPresent()) {
                                throw error.get();
                            }
                        }
                    }
                    synchronized (this) {
                        deliveries.addAll(outcomes);
                        notifyAll();
                    }
                }
            } catch (Exception error) {
                synchronized (this) {
                    failure = error;
                    notifyAll();
                }
            }
        }

        private List<Object> settle(ConsumerRecord<byte[], byte[]> each) {
            String value = text(each.value());
            int count = each.deliveryCount().orElseThrow();
            AcknowledgeType outcome = AcknowledgeType.ACCEPT;
            if (isExplicit) {
                if (value.startsWith("bad")) {
                    outcome = AcknowledgeType.REJECT;
                } else if (value.startsWith("flaky") && count < ENOUGH_DELIVERIES) {
                    outcome = AcknowledgeType.RELEASE;
                }
                consumer.acknowledge(each, outcome);
            }
            return List.of(value, count, outcome.toString());
        }

        synchronized List<List<Object>> await(int count) throws InterruptedException {
            long deadline = System.nanoTime() + Clients.DEADLINE.toNanos();
            while (failure == null && deliveries.size() < count) {
                long left = (deadline - System.nanoTime()) / 1_000_000;
                if (left <= 0) {
                    throw new AssertionError("wanted " + count + " deliveries: " + deliveries);
                }
                wait(left);
            }
            if (failure != null) {
                throw new AssertionError(failure);
            }
            return List.copyOf(deliveries);
        }

        List<List<Object>> leave() throws InterruptedException {
            leaving = true;
            thread.join();
            return await(0);
        }
    }
}
