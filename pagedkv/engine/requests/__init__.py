"""Requests: from what a caller gives to what it gets."""
