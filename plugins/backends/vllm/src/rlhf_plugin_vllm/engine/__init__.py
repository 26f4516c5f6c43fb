"""A vLLM engine in this process: starting it, isolating it, and cleaning up after it."""
