"""The sentences that `--explain` prints about a command."""
