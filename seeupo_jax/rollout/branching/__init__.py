"""Conversations that branch at the ends of turns: which trees groups become, and how."""
