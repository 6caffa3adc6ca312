"""The layout with the shortest estimated iteration on a TPU slice, and its table."""
