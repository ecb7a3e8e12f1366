"""What a log knows of its producers: sequences, open and aborted transactions, and their snapshots."""
