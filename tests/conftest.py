"""Test configuration: 8 simulated devices, explicit rank promotion, warnings are errors."""

import os

# XLA reads these when the backend starts, so they come before the first jax call.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As `prepare_backend` does for a plan: two workers may compile for a TPU at the same time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
