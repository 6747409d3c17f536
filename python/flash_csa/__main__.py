"""`python -m flash_csa`."""

from .cli import main

main()
