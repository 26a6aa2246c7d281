"""Several processes that work as one: a team of ranks, of which the first alone decides."""
