"""What the processes of a run compare before they begin."""
