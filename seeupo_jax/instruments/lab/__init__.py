"""The laboratory: tabular problems whose optimum is known, so that convergence is measured.

Axes of its arrays, beside those of `types.py`: S seeds, I iterations, A actions, C contexts (every
sequence of actions so far that is not yet whole, by turn and then in the order of its digits), U
actions of one step, each of at most L turns.
"""
