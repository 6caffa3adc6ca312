"""What every command does before its work: flags, places, processes, XLA."""
