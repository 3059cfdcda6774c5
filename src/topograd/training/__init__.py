"""Training: the stage executor, objectives, the trainer and its checkpoints, evaluation."""
