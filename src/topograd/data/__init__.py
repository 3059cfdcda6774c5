"""Data: corpora, tokenizers, memory-mapped shards, packing, training batches and evaluation windows."""

from topograd.data.bpe import BPETokenizer
from topograd.data.corpus import Corpus, Document, read_corpus
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.data.loader import IGNORED, Loader
from topograd.data.packing import Rows, pack
from topograd.data.prepare import Prepared, default_cache, prepare
from topograd.data.shards import Shards, write_shards
from topograd.data.tokenizer import Tokenizer
from topograd.data.tokenizer_file import load_tokenizer
from topograd.data.windows import Text, windows

__all__ = [
    "IGNORED",
    "BPETokenizer",
    "Corpus",
    "Document",
    "HFTokenizer",
    "Loader",
    "Prepared",
    "Rows",
    "Shards",
    "Text",
    "Tokenizer",
    "default_cache",
    "load_tokenizer",
    "pack",
    "prepare",
    "read_corpus",
    "windows",
    "write_shards",
]
