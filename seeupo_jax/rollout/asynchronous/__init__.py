"""Collection beside training: tickets, and what workers and the trainer exchange."""
