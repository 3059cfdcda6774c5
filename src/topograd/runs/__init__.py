"""A run: its folder, its settings, its checkpoints, and how it is opened."""
