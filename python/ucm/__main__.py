"""``python -m ucm`` is the command line ``ucm``."""

from __future__ import annotations

from ucm.cli import main

if __name__ == "__main__":
    main(prog_name="ucm")
