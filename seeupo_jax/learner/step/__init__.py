"""One jitted optimizer step on the actions of a turn."""
