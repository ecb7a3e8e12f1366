"""The consumer group protocol of KIP-848, and how a group moves to it from the classic one."""
