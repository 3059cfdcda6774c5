"""The command `topograd`, as `python -m topograd`."""

import sys

from topograd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
