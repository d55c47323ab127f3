"""The ``flagstone`` command."""

from __future__ import annotations

from flagstone.cli.app import main

__all__ = ["main"]
