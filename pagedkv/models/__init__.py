"""Models over the operations."""

DTYPES = ("float32", "float16", "bfloat16")  # of weights and activations
