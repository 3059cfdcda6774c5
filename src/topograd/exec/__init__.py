"""Running the stages of a plan: the forward pass, and what a stage keeps between tokens."""
