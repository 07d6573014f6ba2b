"""Per-example losses: one value an example, never a mean.

The engine sums them under its mask and divides once by the count of the global batch;
a mean taken here would weigh workers instead of examples.
"""

import optax
from jaxtyping import Array, Bool, Float, Integer


def softmax_cross_entropy(
    logits: Float[Array, "c classes"], labels: Integer[Array, "c"]
) -> tuple[Float[Array, "c"], dict[str, Bool[Array, "c"]]]:
    """The cross-entropy of each example, and whether it was classified rightly.

    Returns:
      losses in nats [c], and the metrics {"accuracy": [c]}.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, {"accuracy": logits.argmax(axis=-1) == labels}
