"""Which values of a configuration go together."""
