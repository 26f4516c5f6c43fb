"""A vLLM engine in this process: start, isolation and cleanup."""
