"""``python -m flagstone``: the command."""

from flagstone.cli import main

main()
