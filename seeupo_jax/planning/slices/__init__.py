"""The programs of a run on a TPU slice, and estimates of their time."""
