package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.check;
import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.numbered;
import static tidemill.Clients.refusal;
import static tidemill.Clients.take;
import static tidemill.Clients.texts;
import static tidemill.Clients.until;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.regex.Pattern;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.MemberDescription;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;

/** Consumer groups of both protocols, and what an admin client does with them. */
public final class Groups {
    private final Clients clients;
    private final Map<String, Member> members = new HashMap<>();

    Groups(Clients clients) {
        this.clients = clients;
    }

    // --- members, one step at a time: see support/group_stories.py

    public Object createTopic(Arguments arguments) throws Exception {
        clients.create(arguments.text("topic"), arguments.number("partitions"), Map.of());
        return null;
    }

    public Object produceToPartitions(Arguments arguments) throws Exception {
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (String text : arguments.texts("texts")) {
            int partition = records.size() % arguments.number("partitions");
            records.add(new ProducerRecord<>(arguments.text("topic"), partition, null, bytes(text)));
        }
        clients.send(records, Map.of());
        return null;
    }

    public Object memberJoin(Arguments arguments) {
        Map<String, Object> configs = arguments.configs("name", "group", "topic");
        Member member = new Member(clients, arguments.text("group"), arguments.text("topic"), configs);
        members.put(arguments.text("name"), member);
        return null;
    }

    public Object memberWait(Arguments arguments) throws Exception {
        Member member = members.get(arguments.text("name"));
        return member.await(arguments.number("partitions", -1), arguments.number("values", 0));
    }

    public Object memberLeave(Arguments arguments) throws Exception {
        members.remove(arguments.text("name")).leave();
        return null;
    }

    // --- offsets

    public Object offsetsAreCommittedAndFetched(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition first = new TopicPartition(topic, 0);
        TopicPartition second = new TopicPartition(topic, 1);
        clients.create(topic, 2, Map.of());
        clients.produce(topic, numbered("v", 0, 10), Map.of());
        Map<String, Object> configs = Map.of("group.id", topic, "max.poll.records", 4);
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(configs)) {
            consumer.assign(List.of(first));
            take(consumer, 4);
            consumer.commitSync();
            consumer.commitSync(Map.of(second, new OffsetAndMetadata(77, "a note")));
        }
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(configs)) {
            Map<TopicPartition, OffsetAndMetadata> found = consumer.committed(Set.of(first, second));
            checkEqual(List.of(found.get(first).offset(), found.get(second).offset()), List.of(4L, 77L));
            checkEqual(found.get(second).metadata(), "a note");
            consumer.assign(List.of(first));
            checkEqual(texts(take(consumer, 6)), numbered("v", 4, 10));
        }
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(Map.of("group.id", topic + "-unknown"))) {
            checkEqual(consumer.committed(Set.of(first)).get(first), null);
        }
        return null;
    }

    public Object aPatternSubscribesToTheTopicsItMatches(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        for (String name : List.of(topic + "-a", topic + "-b", "other-" + topic)) {
            clients.create(name);
            clients.produce(name, List.of(name), Map.of());
        }
        Map<String, Object> configs = arguments.configs("topic");
        configs.put("group.id", topic);
        try (KafkaConsumer<byte[], byte[]> consumer = clients.consumer(configs)) {
            consumer.subscribe(Pattern.compile("^" + topic + "-.*"));
            checkEqual(new TreeSet<>(texts(take(consumer, 2))), new TreeSet<>(List.of(topic + "-a", topic + "-b")));
        }
        return null;
    }

    public Object groupOffsetsAreListedAlteredAndDeleted(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        TopicPartition place = new TopicPartition(topic, 0);
        Admin admin = clients.admin();
        clients.create(topic);
        done(admin.alterConsumerGroupOffsets(topic, Map.of(place, new OffsetAndMetadata(5))).all());
        checkEqual(committed(topic), Map.of(place, 5L));
        done(admin.deleteConsumerGroupOffsets(topic, Set.of(place)).all());
        checkEqual(committed(topic), Map.of());
        return null;
    }

    private Map<TopicPartition, Long> committed(String group) throws Exception {
        Map<TopicPartition, Long> found = new HashMap<>();
        done(clients.admin().listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata())
                .forEach((place, offset) -> found.put(place, offset.offset()));
        return found;
    }

    // --- groups as an admin client sees them

    public Object groupsAreListedDescribedAndDeleted(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Admin admin = clients.admin();
        Map<String, Object> configs = arguments.configs("topic", "type", "assignor");
        configs.put("client.id", "tester");
        clients.create(topic, 2, Map.of());
        Member member = new Member(clients, topic, topic, configs);
        member.await(2, 0);
        GroupListing listed =
                done(admin.listGroups().all()).stream().filter(one -> one.groupId().equals(topic)).findFirst().get();
        checkEqual(listed.type().get(), GroupType.parse(arguments.text("type")));
        checkEqual(listed.groupState().get(), GroupState.STABLE);
        ConsumerGroupDescription group = described(topic);
        checkEqual(List.of(group.groupState(), group.partitionAssignor()), List.of(GroupState.STABLE, arguments.text("assignor")));
        MemberDescription only = group.members().iterator().next();
        check(only.clientId().equals("tester") && only.host().endsWith("127.0.0.1"), only);
        checkEqual(only.assignment().topicPartitions(), Set.of(new TopicPartition(topic, 0), new TopicPartition(topic, 1)));
        checkEqual(refusal(admin.deleteConsumerGroups(List.of(topic)).all()), "GroupNotEmptyException");
        member.leave();
        checkEqual(described(topic).groupState(), GroupState.EMPTY);
        done(admin.deleteConsumerGroups(List.of(topic)).all());
        checkEqual(refusal(admin.deleteConsumerGroups(List.of(topic)).all()), "GroupIdNotFoundException");
        check(done(admin.listGroups().all()).stream().noneMatch(one -> one.groupId().equals(topic)), topic);
        return null;
    }

    public Object aMemberIsRemovedByItsInstanceId(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 2, Map.of());
        Map<String, Object> configs = arguments.configs("topic");
        configs.put("group.instance.id", "first");
        Member first = new Member(clients, topic, topic, configs);
        first.await(2, 0);
        configs.put("group.instance.id", "second");
        Member second = new Member(clients, topic, topic, configs);
        first.await(1, 0);
        second.await(1, 0);
        // A static member that goes is expected back, so its partition waits for it.
        second.leave();
        checkEqual(described(topic).members().size(), 2);
        RemoveMembersFromConsumerGroupOptions gone = new RemoveMembersFromConsumerGroupOptions(List.of(new MemberToRemove("second")));
        done(clients.admin().removeMembersFromConsumerGroup(topic, gone).all());
        first.await(2, 0);
        checkEqual(described(topic).members().size(), 1);
        // Without names all members are removed.
        first.leave();
        done(clients.admin().removeMembersFromConsumerGroup(topic, new RemoveMembersFromConsumerGroupOptions()).all());
        until(() -> state(topic) == GroupState.EMPTY, "the group is empty");
        return null;
    }

    private GroupState state(String group) {
        try {
            return described(group).groupState();
        } catch (Exception error) {
            throw new AssertionError(error);
        }
    }

    private ConsumerGroupDescription described(String group) throws Exception {
        return done(clients.admin().describeConsumerGroups(List.of(group)).all()).get(group);
    }
}
