"""Singular invariants: crossings, fluctuation, what follows for losses, curvature, and a sampler."""
