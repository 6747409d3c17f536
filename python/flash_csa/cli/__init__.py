"""The command line: `python -m flash_csa`, or `flash-csa`."""

import sys

_EXTRA = ("typer", "rich", "safetensors")


def main() -> None:
    """Runs the command line; without its packages, says how to get them."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        hint = "pip install 'flash_csa[cli]'"
        print(f"flash_csa: the command line needs {missing}: {hint}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="flash_csa")
