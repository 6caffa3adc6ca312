"""`--explain`: what a command would run, told before any of it."""
