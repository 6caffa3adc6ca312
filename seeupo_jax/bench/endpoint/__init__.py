"""What the endpoint costs agents, and how it serves beside `transformers`."""
