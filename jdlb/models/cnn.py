"""A small convolutional network for 28x28 images.

Two 3x3 convolutions without padding, one pooling, two dense layers: 1,199,882
parameters at 28x28x1 and 10 classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


def max_pool_2x2(x: Float[Array, "b h w d"]) -> Float[Array, "b h//2 w//2 d"]:
    """The maximum of each 2x2 window; an odd last row or column is left out.

    By `reshape` and `max`: the gradient of `reduce_window` is slow on XLA's CPU
    backend, and the whole step is 1.3 to 1.45 times faster this way.
    """
    b, h, w, d = x.shape
    x = x[:, : h - h % 2, : w - w % 2, :]
    return x.reshape(b, h // 2, 2, w // 2, 2, d).max(axis=(2, 4))


class Cnn(nn.Module):
    """conv 32, conv 64, pool, dense 128, dense `classes`."""

    classes: int = 10

    @nn.compact
    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b classes"]:
        x = nn.relu(nn.Conv(32, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Conv(64, (3, 3), padding="VALID")(x))
        x = max_pool_2x2(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128)(x))
        return jnp.asarray(nn.Dense(self.classes)(x))
