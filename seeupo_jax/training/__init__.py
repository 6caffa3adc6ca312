"""A training run: its parts, its steps, what it writes, where it resumes and why it ends."""
