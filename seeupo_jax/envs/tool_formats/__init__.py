"""Formats of tool calls: one file each, and the table `formats.TOOL_FORMATS`."""
