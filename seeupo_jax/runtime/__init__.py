"""The parts of a run, its loop, resuming, evaluation and export, for the commands."""
