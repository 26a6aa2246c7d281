"""Runs the model, a step at a time."""
