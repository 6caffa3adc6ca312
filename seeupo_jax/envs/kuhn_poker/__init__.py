"""Kuhn poker: two players, three cards, hidden information."""
