"""Benchmarks of a node. Each prints its numbers beside a peer or a limit taken in the same run.

Run them with ``python -m bench`` (``make bench``). Rules:

- The node, every client and every peer is a process of its own.
- What is compared is measured in turns, several rounds long: the machine may be busy with other things, and
  then both sides suffer. A ratio is taken within a round; the table shows the median and the extremes.
- A node is measured as a user would install it (``launch`` starts it so).
"""
