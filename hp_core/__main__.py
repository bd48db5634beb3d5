"""`python -m hp_core` is `hp-train`."""

import sys

from hp_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
