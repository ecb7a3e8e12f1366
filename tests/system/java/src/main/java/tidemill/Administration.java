package tidemill;

import static tidemill.Clients.bytes;
import static tidemill.Clients.check;
import static tidemill.Clients.checkEqual;
import static tidemill.Clients.done;
import static tidemill.Clients.outcome;
import static tidemill.Clients.refusal;

import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.DescribeClusterOptions;
import org.apache.kafka.clients.admin.DescribeClusterResult;
import org.apache.kafka.clients.admin.DescribeConsumerGroupsOptions;
import org.apache.kafka.clients.admin.DescribeTopicsOptions;
import org.apache.kafka.clients.admin.FeatureMetadata;
import org.apache.kafka.clients.admin.FeatureUpdate;
import org.apache.kafka.clients.admin.ListConfigResourcesOptions;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.LogDirDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.QuorumInfo;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.UpdateFeaturesOptions;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.config.ConfigResource;

/** What an admin client does, but for groups and transactions. */
public final class Administration {
    private final Clients clients;

    Administration(Clients clients) {
        this.clients = clients;
    }

    public Object topicsAreCreatedDescribedAndDeleted(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Admin admin = clients.admin();
        clients.create(topic, 5, Map.of("retention.ms", "1000000"));
        checkEqual(outcome(() -> clients.create(topic)), "TopicExistsException");
        checkEqual(outcome(() -> clients.create("no/slash")), "InvalidTopicException");
        List<NewTopic> replicated = List.of(new NewTopic(topic + "-2", 1, (short) 3));
        checkEqual(refusal(admin.createTopics(replicated).all()), "InvalidReplicationFactorException");
        checkEqual(outcome(() -> clients.create(topic + "-2", 1, Map.of("retention.mss", "1"))), "InvalidConfigurationException");
        List<NewTopic> validated = List.of(new NewTopic(topic + "-2", 1, (short) 1));
        done(admin.createTopics(validated, new CreateTopicsOptions().validateOnly(true)).all());
        Set<String> names = done(admin.listTopics().names());
        check(names.contains(topic) && !names.contains(topic + "-2"), names);

        // Several pages, because a page holds two partitions.
        DescribeTopicsOptions paged = new DescribeTopicsOptions().partitionSizeLimitPerResponse(2);
        TopicDescription described = done(admin.describeTopics(List.of(topic), paged).allTopicNames()).get(topic);
        checkEqual(described.partitions().stream().map(each -> each.partition()).toList(), List.of(0, 1, 2, 3, 4));
        check(described.partitions().stream().allMatch(each -> each.leader().id() == 1 && each.isr().size() == 1), described);
        TopicCollection byId = TopicCollection.ofTopicIds(List.of(described.topicId()));
        checkEqual(done(admin.describeTopics(byId).allTopicIds()).get(described.topicId()).name(), topic);

        done(admin.deleteTopics(byId).all());
        check(!done(admin.listTopics().names()).contains(topic), topic);
        checkEqual(refusal(admin.deleteTopics(List.of(topic)).all()), "UnknownTopicOrPartitionException");
        clients.create(topic);
        checkEqual(offset(topic, OffsetSpec.latest()).offset(), 0L);
        return null;
    }

    public Object partitionsAreAdded(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Admin admin = clients.admin();
        clients.create(topic);
        done(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all());
        checkEqual(done(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions().size(), 3);
        checkEqual(refusal(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(2))).all()), "InvalidPartitionsException");
        clients.send(List.of(new ProducerRecord<>(topic, 2, null, bytes("v"))), Map.of());
        checkEqual(Clients.texts(clients.read(new TopicPartition(topic, 2), 0, 1, Map.of())), List.of("v"));
        return null;
    }

    public Object configsAreDescribedAndAltered(Arguments arguments) throws Exception {
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, arguments.text("topic"));
        Admin admin = clients.admin();
        clients.create(topic.name(), 1, Map.of("retention.ms", "1000000"));
        checkEqual(config(topic, "retention.ms"), List.of("1000000", false));
        checkEqual(config(topic, "cleanup.policy"), List.of("delete", true));
        Collection<AlterConfigOp> changes =
                List.of(
                        new AlterConfigOp(new ConfigEntry("retention.bytes", "5000"), AlterConfigOp.OpType.SET),
                        new AlterConfigOp(new ConfigEntry("cleanup.policy", "compact"), AlterConfigOp.OpType.APPEND),
                        new AlterConfigOp(new ConfigEntry("retention.ms", null), AlterConfigOp.OpType.DELETE));
        done(admin.incrementalAlterConfigs(Map.of(topic, changes)).all());
        checkEqual(config(topic, "retention.bytes"), List.of("5000", false));
        checkEqual(config(topic, "cleanup.policy"), List.of("delete,compact", false));
        checkEqual(config(topic, "retention.ms"), List.of("604800000", true));
        Collection<AlterConfigOp> bad = List.of(new AlterConfigOp(new ConfigEntry("retention.ms", "soon"), AlterConfigOp.OpType.SET));
        checkEqual(refusal(admin.incrementalAlterConfigs(Map.of(topic, bad)).all()), "InvalidConfigurationException");
        checkEqual(config(new ConfigResource(ConfigResource.Type.BROKER, "1"), "node_id"), List.of("1", true));
        return null;
    }

    private List<Object> config(ConfigResource resource, String name) throws Exception {
        ConfigEntry entry = done(clients.admin().describeConfigs(List.of(resource)).all()).get(resource).get(name);
        return List.of(entry.value(), entry.isDefault());
    }

    public Object theOffsetOfTheNewestTimestampIsFound(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic, 1, Map.of("retention.ms", "-1"));
        for (long time : List.of(1_000L, 9_000L, 3_000L)) {
            clients.send(List.of(new ProducerRecord<>(topic, 0, time, null, bytes("v"))), Map.of());
        }
        List<Long> found = new ArrayList<>();
        for (OffsetSpec spec :
                List.of(
                        OffsetSpec.earliest(),
                        OffsetSpec.latest(),
                        OffsetSpec.maxTimestamp(),
                        OffsetSpec.forTimestamp(2_000),
                        OffsetSpec.earliestLocal())) {
            found.add(offset(topic, spec).offset());
        }
        checkEqual(found, List.of(0L, 3L, 1L, 1L, 0L));
        checkEqual(offset(topic, OffsetSpec.maxTimestamp()).timestamp(), 9_000L);
        checkEqual(offset(topic, OffsetSpec.earliestLocal()).leaderEpoch(), Optional.of(0));
        return null;
    }

    private ListOffsetsResultInfo offset(String topic, OffsetSpec spec) throws Exception {
        TopicPartition place = new TopicPartition(topic, 0);
        return done(clients.admin().listOffsets(Map.of(place, spec)).partitionResult(place));
    }

    // --- the cluster

    /** The nodes, by id. */
    public Object theClusterIsDescribed(Arguments arguments) throws Exception {
        DescribeClusterResult described = clients.admin().describeCluster();
        checkEqual(done(described.controller()).id(), 1);
        check(!done(described.clusterId()).isEmpty(), "no cluster id");
        Map<Integer, String> nodes = new HashMap<>();
        for (Node node : done(described.nodes())) {
            nodes.put(node.id(), node.host() + ":" + node.port());
        }
        return nodes;
    }

    /** The versions of the finalized features. */
    public Object featuresAreDescribed(Arguments arguments) throws Exception {
        FeatureMetadata features = done(clients.admin().describeFeatures().featureMetadata());
        Map<String, Integer> found = new HashMap<>();
        features.finalizedFeatures().forEach((name, range) -> found.put(name, (int) range.maxVersionLevel()));
        return found;
    }

    public Object theQuorumFeaturesAndConfigResourcesAnswerWhatIsTrue(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Admin admin = clients.admin();
        clients.create(topic);
        QuorumInfo quorum = done(admin.describeMetadataQuorum().quorumInfo());
        checkEqual(quorum.leaderId(), 1);
        checkEqual(quorum.voters().stream().map(QuorumInfo.ReplicaState::replicaId).toList(), List.of(1));

        FeatureUpdate lower = new FeatureUpdate((short) 1, FeatureUpdate.UpgradeType.SAFE_DOWNGRADE);
        Map<String, FeatureUpdate> updates = Map.of("transaction.version", lower);
        checkEqual(refusal(admin.updateFeatures(updates, new UpdateFeaturesOptions()).all()), "InvalidUpdateVersionException");

        Set<ConfigResource.Type> types = Set.of(ConfigResource.Type.TOPIC, ConfigResource.Type.CLIENT_METRICS);
        Collection<ConfigResource> resources = done(admin.listConfigResources(types, new ListConfigResourcesOptions()).all());
        check(resources.contains(new ConfigResource(ConfigResource.Type.TOPIC, topic)), resources);
        check(resources.stream().allMatch(each -> each.type() == ConfigResource.Type.TOPIC), resources);
        checkEqual(config(new ConfigResource(ConfigResource.Type.BROKER, "1"), "num.partitions"), List.of("1", true));
        return null;
    }

    /** What this client may do with the cluster, a topic and a group; there are no ACLs, so all that can be done. */
    public Object authorizedOperationsAreShown(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        Admin admin = clients.admin();
        clients.create(topic);
        TopicPartition place = new TopicPartition(topic, 0);
        done(admin.alterConsumerGroupOffsets(topic, Map.of(place, new OffsetAndMetadata(0))).all());
        Set<AclOperation> cluster =
                done(admin.describeCluster(new DescribeClusterOptions().includeAuthorizedOperations(true)).authorizedOperations());
        Set<AclOperation> onTopic =
                done(admin.describeTopics(List.of(topic), new DescribeTopicsOptions().includeAuthorizedOperations(true)).allTopicNames())
                        .get(topic)
                        .authorizedOperations();
        Set<AclOperation> onGroup =
                done(
                                admin.describeConsumerGroups(
                                                List.of(topic),
                                                new DescribeConsumerGroupsOptions().includeAuthorizedOperations(true))
                                        .all())
                        .get(topic)
                        .authorizedOperations();
        check(cluster != null && cluster.containsAll(Set.of(AclOperation.CREATE, AclOperation.DESCRIBE)), cluster);
        check(onTopic != null && onTopic.containsAll(Set.of(AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE)), onTopic);
        check(onGroup != null && onGroup.containsAll(Set.of(AclOperation.READ, AclOperation.DELETE)), onGroup);
        return null;
    }

    public Object leadersAreElected(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic);
        Set<TopicPartition> places = Set.of(new TopicPartition(topic, 0));
        String outcome = refusal(clients.admin().electLeaders(ElectionType.PREFERRED, places).all());
        check(Set.of("ok", "ElectionNotNeededException").contains(outcome), outcome);
        return null;
    }

    public Object logDirectoriesShowTheSizeOfPartitions(Arguments arguments) throws Exception {
        String topic = arguments.text("topic");
        clients.create(topic);
        clients.produce(topic, List.of("x".repeat(1_000)), Map.of());
        Map<String, LogDirDescription> directories = done(clients.admin().describeLogDirs(List.of(1)).allDescriptions()).get(1);
        long size = directories.values().iterator().next().replicaInfos().get(new TopicPartition(topic, 0)).size();
        check(size >= 1_000, size);
        return null;
    }
}
