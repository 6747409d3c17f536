"""The benchmark: `python -m bench.run --list`."""
