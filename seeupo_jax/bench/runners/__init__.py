"""The sides of a benchmark: what runs an update or a rollout, and what measures it."""
