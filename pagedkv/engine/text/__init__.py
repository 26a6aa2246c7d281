"""Texts and chats to token ids, and back."""
