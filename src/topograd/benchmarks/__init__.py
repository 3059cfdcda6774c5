"""What `topograd bench` measures: ways of decoding, of going backward, of stepping. Always ratios."""
