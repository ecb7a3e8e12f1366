"""``python -m tidemill`` is the command ``tidemill``."""

from __future__ import annotations

from tidemill.cli import main

if __name__ == "__main__":
    main()
