"""Where the code of plugins runs: worker processes, threads and the event loop, each call within a deadline."""
