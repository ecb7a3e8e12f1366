"""Kafka v2 record batches as bytes: headers, records, compression. No I/O."""
