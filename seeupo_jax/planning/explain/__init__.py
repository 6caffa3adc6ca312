"""What a command would do, in words: `--explain`."""
