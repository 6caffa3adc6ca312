"""Recipes trained with several seeds each on one budget, then drawn and tabulated."""
