"""The command ``torch-tpu``. Needs the extra ``cli`` (typer, rich)."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    try:
        from torch_tpu.cli.app import app
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich"):
            raise
        sys.exit(f"torch-tpu needs the package {e.name}.\n  Fix: pip install 'torch_tpu[cli]'")
    app()
