"""Other libraries' names over pagedkv's operations, one module a library."""
