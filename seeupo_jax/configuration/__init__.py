"""The configuration of a run: fields, files, recipes and flags."""
