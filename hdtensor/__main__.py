"""``python -m hdtensor``."""

import sys

from hdtensor.cli import main


if __name__ == "__main__":
    sys.exit(main())
