"""A module of another library as a stack."""
