"""Guesses of the next tokens, which a step checks: who makes them, and how many pay."""
