"""Dynamic load balance for synchronous data-parallel training, in JAX."""
