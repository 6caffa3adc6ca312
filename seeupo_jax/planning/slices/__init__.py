"""The programs of a run on a TPU slice, and lower bounds on their time."""
