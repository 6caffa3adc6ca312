"""Programs compiled for TPUs that are not here, and what they would need there."""
