"""Optimizers, groups of parameters, schedules."""
