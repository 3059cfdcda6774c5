"""Loading a tokenizer of either kind from its file."""

from pathlib import Path

from topograd.data.bpe import BPETokenizer
from topograd.data.hf_tokenizer import HFTokenizer, is_tokenizer_json
from topograd.data.tokenizer import Tokenizer
from topograd.errors import DataError
from topograd.files import read_json


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what `save` wrote, or Hugging Face's tokenizer.json with the files beside it."""
    content = read_json(path, DataError)
    return HFTokenizer.load(path) if is_tokenizer_json(content) else BPETokenizer.from_file(path, content)
