"""`python train.py key=value …` is `rlx train key=value …`: compose a configuration, check it, plan it, run it. Try `--help`."""

import sys

from rlx.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(main())
