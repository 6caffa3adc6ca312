"""`bench asynchronous`: training while samplers wait for slow environments."""
