"""One module per table, figure or experiment of the papers, run by `python -m topograd.studies.NAME`."""
