"""Flax models and per-example losses."""
