"""Commands over the library: `python -m experiments`."""
