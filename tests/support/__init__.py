"""What several tests share: a disk that lies, a history checker, and makers of batches."""
