"""The generator ``vllm_server``: vLLM servers that are already running."""
