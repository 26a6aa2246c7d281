"""Models over the operations."""

DTYPES = ("float32", "float16", "bfloat16")  # of weights and activations
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint8": 1, "float8_e4m3fn": 1}
