"""Models: the stack protocol, the GPT, heads, relays, decoding."""
