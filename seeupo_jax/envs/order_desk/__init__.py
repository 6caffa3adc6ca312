"""The order desk: synthetic customer service."""
