"""Recurrent mixers: Mamba-2 and Mamba-3, their scan and their state."""
