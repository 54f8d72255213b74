"""`python -m ampdoctor`."""

from __future__ import annotations

import sys

from ampdoctor.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
