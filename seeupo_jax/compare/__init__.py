"""Recipes side by side: each trained with several seeds on one budget, then drawn and tabulated."""
