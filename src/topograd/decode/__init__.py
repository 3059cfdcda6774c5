"""The inference engine: as much depth as each token needs."""
