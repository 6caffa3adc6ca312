"""The sampler: programs, cache pages and what may be sampled."""
