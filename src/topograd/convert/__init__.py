"""Models made elsewhere: read, run and written back."""
