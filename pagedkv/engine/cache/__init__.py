"""The memory of the KV cache, and its file."""
