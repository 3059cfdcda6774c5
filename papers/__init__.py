"""The reproduction of five papers: a folder for each, its studies, and what came of every claim.

It is run from the root of a clone as `python -m papers`, and is not installed.
"""

PROGRAM = "python -m papers"
"""As it is typed, for usage and errors."""
