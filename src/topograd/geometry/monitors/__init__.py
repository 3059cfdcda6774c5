"""Readings while a model trains, and of a checkpoint: each needs a few lines around anybody's loop."""
