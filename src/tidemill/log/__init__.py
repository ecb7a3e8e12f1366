"""The durable log of a partition, its recovery after a crash, and the storage below it. No asyncio."""
