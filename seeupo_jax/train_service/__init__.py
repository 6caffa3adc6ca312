"""A training service: Tinker's API over the policy, its adapters and the sampler."""
