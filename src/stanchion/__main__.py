"""``python -m stanchion``: the same as the command ``stanchion``."""

from __future__ import annotations

from stanchion.cli import main

if __name__ == "__main__":
    main()
