"""Specialists: stages added to a frozen base, each a small folder of its own."""
