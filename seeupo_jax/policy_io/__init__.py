"""Policies in and out: built from a configuration, loaded, resumed, written and published."""
