"""Programs compiled for TPUs that this machine does not have: memory, work and communication."""
