"""Models: the stack protocol, the GPT and its recurrent variants, heads, relays, interfaces, decoding."""

from topograd.nn.mamba2 import Mamba2Mixer
from topograd.nn.mamba3 import Mamba3Mixer
from topograd.nn.ssd import ssd

__all__ = ["Mamba2Mixer", "Mamba3Mixer", "ssd"]
