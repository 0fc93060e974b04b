"""`python -m topkd`: the same as the command `topkd`."""

import sys

from topkd.cli import main

if __name__ == "__main__":
    sys.exit(main())
