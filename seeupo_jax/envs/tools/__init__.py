"""Tools as models read and call them, whoever has them: tags of calls, and JSON schemas."""
