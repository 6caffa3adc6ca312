"""What a gradient becomes: optimizers, groups of parameters, schedules."""
