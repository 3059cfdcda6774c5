"""Models: the stack protocol, the GPT and its layers, heads, relays, interfaces, decoding."""
