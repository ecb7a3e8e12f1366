"""The protocol that nodes speak with each other: messages, connections, the listener.

| module | idea |
| --- | --- |
| ``messages`` | every message, as values |
| ``codes`` | error codes between nodes and Kafka's, both ways |
| ``frames`` | messages as bytes: encoding without copying records, decoding what may be hostile |
| ``handshake`` | who is there: the proof of the shared secret, both ways |
| ``stream`` | frames from and to a socket, with limits before memory is taken |
| ``peer`` | asking other nodes: one connection, and connections to all of them |
| ``listener`` | being asked: connections that are accepted, and the requests that come in |

``docs/cluster-protocol.md`` describes the same for those who write another implementation.
"""
