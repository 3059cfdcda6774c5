"""One module per table, figure or experiment of the papers; `topograd study` lists and runs them."""
