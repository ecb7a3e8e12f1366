package tidemill;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.List;

/**
 * The side of a Java client process that {@code support.processes.ClientProcess} talks to.
 *
 * <p>Each line of input is a call, {@code {"name": …, "arguments": {…}}}; each line of output is its {@code result} or
 * {@code error}. A call {@code member_wait} runs the method {@code memberWait} of one of the scenario classes. When the
 * input ends the process does, too, so it never outlives the tests.
 */
public final class Worker {
    private static final ObjectMapper JSON = new ObjectMapper();

    private Worker() {}

    public static void main(String[] arguments) throws Exception {
        // Libraries may print; the answers keep the real standard output for themselves.
        PrintStream answers = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        Clients clients = new Clients(arguments[0]);
        List<Object> scenarios =
                List.of(
                        new Records(clients),
                        new Groups(clients),
                        new Administration(clients),
                        new Transactions(clients),
                        new ShareGroups(clients),
                        new Exchange(clients),
                        new WordCount(clients));
        BufferedReader calls = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = calls.readLine(); line != null; line = calls.readLine()) {
            answers.println(answer(scenarios, JSON.readTree(line)));
        }
        // Threads of a client that hangs must not keep the process.
        Runtime.getRuntime().halt(0);
    }

    private static String answer(List<Object> scenarios, JsonNode call) throws Exception {
        try {
            Object result = run(scenarios, call.get("name").asText(), new Arguments(call.get("arguments")));
            return JSON.writeValueAsString(Collections.singletonMap("result", result));
        } catch (Throwable error) {
            StringWriter text = new StringWriter();
            error.printStackTrace(new PrintWriter(text));
            return JSON.writeValueAsString(Collections.singletonMap("error", text.toString()));
        }
    }

    private static Object run(List<Object> scenarios, String name, Arguments arguments) throws Throwable {
        for (Object scenario : scenarios) {
            for (Method method : scenario.getClass().getMethods()) {
                if (method.getName().equals(camelCase(name))) {
                    try {
                        return method.invoke(scenario, arguments);
                    } catch (InvocationTargetException error) {
                        throw error.getCause();
                    }
                }
            }
        }
        throw new IllegalArgumentException("no scenario is called " + name);
    }

    private static String camelCase(String name) {
        StringBuilder text = new StringBuilder();
        for (String word : name.split("_")) {
            boolean first = text.length() == 0;
            text.append(first ? word : Character.toUpperCase(word.charAt(0)) + word.substring(1));
        }
        return text.toString();
    }
}
