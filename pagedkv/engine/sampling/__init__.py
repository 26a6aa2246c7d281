"""From hidden states to tokens."""
