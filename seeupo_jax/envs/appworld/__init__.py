"""AppWorld."""
