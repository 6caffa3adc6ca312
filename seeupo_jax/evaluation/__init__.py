"""Evaluation: its episodes, the policies that play them, and its figures."""
