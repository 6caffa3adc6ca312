"""Conversations of a chat template: as text, as tokens, and turn by turn."""
