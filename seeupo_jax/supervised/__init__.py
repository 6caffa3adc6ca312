"""Supervised fine-tuning: conversations from a file, tfds or an environment, and the run."""
