"""A run explained to a person: figures and one self-contained HTML page, from plain records.

It reads only dictionaries as JSON holds them, so it knows nothing of models or trainers.
"""
