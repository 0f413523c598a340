"""``python -m paramp``: the same as the console script ``paramp``."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
