package tidemill;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** The arguments of one call. */
final class Arguments {
    private final JsonNode values;

    Arguments(JsonNode values) {
        this.values = values;
    }

    String text(String name) {
        if (!values.has(name)) {
            throw new IllegalArgumentException("the argument " + name + " is missing");
        }
        return values.get(name).asText();
    }

    List<String> texts(String name) {
        List<String> found = new ArrayList<>();
        values.get(name).forEach(each -> found.add(each.asText()));
        return found;
    }

    int number(String name) {
        return Integer.parseInt(text(name));
    }

    int number(String name, int otherwise) {
        return values.hasNonNull(name) ? values.get(name).asInt() : otherwise;
    }

    /** Every further argument as a config of a client: {@code session_timeout_ms} is session.timeout.ms. */
    Map<String, Object> configs(String... named) {
        Map<String, Object> found = new HashMap<>();
        for (Map.Entry<String, JsonNode> each : values.properties()) {
            if (!Set.of(named).contains(each.getKey())) {
                found.put(each.getKey().replace('_', '.'), each.getValue().asText());
            }
        }
        return found;
    }
}
