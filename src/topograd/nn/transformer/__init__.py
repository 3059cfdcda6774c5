"""Transformers: one block with traits, for the GPT that is trained here and for published families."""
