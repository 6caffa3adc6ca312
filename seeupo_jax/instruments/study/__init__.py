"""Studies: recipes tuned, trained with fresh seeds, ablated and reported on one page."""
