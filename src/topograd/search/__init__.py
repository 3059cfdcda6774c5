"""Choosing a configuration: utility, dynamic programming, soft boundaries, surgery, the Pareto front."""
