"""The code that runs in a worker process, and the packing of arguments and results."""
