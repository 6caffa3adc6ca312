"""APIs of model servers: a request becomes a `ModelCall`, its completion a reply or events."""
