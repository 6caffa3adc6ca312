"""APIs of model servers: requests become `ModelCall`s, completions become replies or events."""
