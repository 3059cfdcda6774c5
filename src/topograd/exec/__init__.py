"""Execution of a plan: the forward pass, training steps, and the state of a stage between tokens."""
