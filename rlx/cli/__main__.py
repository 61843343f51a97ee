"""`python -m rlx.cli` is the command `rlx`."""

import sys

from rlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
