"""What a run would execute on a slice, and how long that takes at least."""
