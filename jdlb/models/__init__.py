"""Flax models and per-example losses."""

from jdlb.models.cnn import Cnn
from jdlb.models.losses import softmax_cross_entropy

__all__ = ["Cnn", "softmax_cross_entropy"]
