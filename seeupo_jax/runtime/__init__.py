"""What commands call: the parts of a run, its loop, resuming, evaluation and export."""
