"""``python -m venturi`` is the command ``venturi``."""

import sys

from venturi.cli import main

if __name__ == "__main__":
    sys.exit(main())
