"""``python -m tpu2edge``."""

import sys

from tpu2edge.cli import main

if __name__ == "__main__":
    sys.exit(main())
