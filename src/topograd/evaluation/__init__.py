"""Scores of a language model, at every depth: sequence probabilities, CORE, the lm-eval adapter."""
