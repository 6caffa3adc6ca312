"""Credit: from the trajectories of an iteration to an advantage of every sampled token."""
