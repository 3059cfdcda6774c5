"""One module per table, figure or experiment of the papers; each is run by `python -m topograd.studies.NAME`."""
