"""Checks of a GPU: numbers beside eager CUDA's, failures, and speed beside what torch offers.

``python -m benchmarks.gpu --part 1`` runs those of correctness, part 2 those of CUDA graphs and
failures, part 3 those of speed.
"""
