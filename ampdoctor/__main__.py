"""`ampdoctor`, and `python -m ampdoctor`."""

from __future__ import annotations

import sys

from ampdoctor.cli import interrupt


def main() -> int:
    """Run the command line of this process and return its exit code; Ctrl-C ends it from the first import on."""
    interrupt.claim()
    from ampdoctor.cli.main import main as answer

    return answer()


if __name__ == "__main__":
    sys.exit(main())
