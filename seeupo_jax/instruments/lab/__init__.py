"""The laboratory: tabular problems whose optimum is known, so that convergence is measured.

Axes of its arrays, in addition to those of `types.py`: S seeds, I iterations, A actions, C contexts
(every incomplete sequence of actions, by turn and then in the order of its digits), U actions of
one step, each of at most L turns.
"""
