"""A small convolutional classifier with batch normalisation.

It keeps the interface honest about models with mutable state and about models that are not language
models. Batch statistics are those of the global batch, whatever the mesh.

Shapes: B batch, H height, W width, C channels or classes.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.compile import remat as remat_block
from jaxtrain.models.convnet_config import ConvNetConfig
from jaxtrain.models.functional import Model, functional

__all__ = ["ConvNetConfig", "as_floats", "convnet"]


class Stage(nnx.Module):
    """Two convolutions with batch normalisation."""

    def __init__(self, inputs: int, outputs: int, momentum: float, *, dtype: str, rngs: nnx.Rngs):
        def conv(channels: int) -> nnx.Conv:
            return nnx.Conv(channels, outputs, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)

        def norm() -> nnx.BatchNorm:
            return nnx.BatchNorm(outputs, momentum=momentum, dtype=dtype, rngs=rngs)

        self.first, self.first_norm = conv(inputs), norm()
        self.second, self.second_norm = conv(outputs), norm()

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        x_BHWC = nnx.relu(self.first_norm(self.first(x_BHWC)))
        return nnx.relu(self.second_norm(self.second(x_BHWC)))


class ConvNet(nnx.Module):
    """Stages with max pooling between them, the mean over the image, one linear layer."""

    def __init__(self, config: ConvNetConfig, *, dtype: str, remat: str, rngs: nnx.Rngs):
        self.remat = remat
        widths = [config.in_channels]
        widths += [config.channels * 2**stage for stage in range(config.num_stages)]
        self.stages = nnx.List(
            [
                Stage(inputs, outputs, config.statistics_momentum, dtype=dtype, rngs=rngs)
                for inputs, outputs in itertools.pairwise(widths)
            ]
        )
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.head = nnx.Linear(widths[-1], config.num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        x_BHWC = image_BHWC
        for index, stage in enumerate(self.stages):
            if index:
                x_BHWC = nnx.max_pool(x_BHWC, (2, 2), strides=(2, 2))
            x_BHWC = self._run(stage, x_BHWC)
        x_BC = jnp.mean(x_BHWC, (1, 2))
        if self.dropout is not None:
            x_BC = self.dropout(x_BC)
        return self.head(x_BC)

    def _run(self, stage: Stage, x_BHWC: jax.Array) -> jax.Array:
        """Calls a stage; with remat on a copy, whose new statistics are carried over."""
        if self.remat == "none":
            return stage(x_BHWC)

        def block(stage: Stage, x_BHWC: jax.Array):
            return stage(x_BHWC), nnx.state(stage, nnx.BatchStat)

        x_BHWC, stats = remat_block(block, self.remat, is_scanned=False)(stage, x_BHWC)
        nnx.update(stage, stats)
        return x_BHWC


def convnet(config: ConvNetConfig, *, precision: str = "float32", remat: str = "none") -> Model:
    """Makes the pure model: batch {"image": [B, H, W, C], floats or uint8} -> logits [B, C].

    When training it normalises by the statistics of the batch and returns moved running ones as
    model state; when not, it uses the running ones, so that padding rows change nothing.
    `precision` is the dtype of the computation; statistics and parameters stay float32. `remat`
    says what of a stage the backward pass computes again; convolutions are no matrix products, so
    "dots" keeps as little of it as "full".
    """
    return functional(
        lambda rngs: ConvNet(config, dtype=precision, remat=remat, rngs=rngs),
        call=lambda module, batch: module(as_floats(batch["image"])),
    )


def as_floats(image: jax.Array) -> jax.Array:
    """Pixels as float32: those of 8 bits are brought to 0..1, floats stay as they are."""
    return image.astype(jnp.float32) / 255 if image.dtype == jnp.uint8 else image
