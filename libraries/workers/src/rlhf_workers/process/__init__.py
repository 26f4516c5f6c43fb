"""What runs in a worker process, and how arguments and results are packed."""
