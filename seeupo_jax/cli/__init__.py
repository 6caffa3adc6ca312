"""Start-up that all commands share: flags, places, processes, XLA."""
