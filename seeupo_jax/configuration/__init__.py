"""What a run is told: fields, files, recipes and flags."""
