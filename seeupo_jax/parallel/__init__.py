"""Where arrays live on many devices."""
