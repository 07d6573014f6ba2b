"""The step: three programs over unequal shares, and the meter that watches them."""
