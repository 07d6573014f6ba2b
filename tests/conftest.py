"""What all tests share: emulated devices, and array shapes checked as the code runs.

The devices must be asked for before anything else touches JAX.
"""

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

# Not an environment variable: processes that tests start choose for themselves.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
# Broadcasting over a missing axis is a mistake until it is written out.
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of a test is compilation. What is compiled in processes of its own (see
# tests/processes) has all optimisations.
jax.config.update("jax_disable_most_optimizations", True)

# The rooms that state shapes of arrays, and the trainer with its parts.
CHECKED = ("engine", "models", "agreement", "pipeline", "steering", "tally", "trainer")
install_import_hook([f"jdlb.{room}" for room in CHECKED], "checked_types.checked")

# A busy machine is not a slow test, and `pytest-timeout` sees to the rest.
settings.register_profile("jdlb", deadline=None)
settings.load_profile("jdlb")
