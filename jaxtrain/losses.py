"""Losses: (outputs, batch, params) -> name -> (sum, weight), additive over rows.

Cross-entropy over a large vocabulary is where a language model's memory goes: [batch, length,
vocab] scores in float32, and their gradient. `lm_loss` computes it in chunks of the length and
never holds more than one chunk.

Shapes: B batch, T length, D embed, V padded vocabulary, C length of a chunk, R = B * C.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import Model
from jaxtrain.models.layers import softcap
from jaxtrain.rules import as_axes, axis_size
from jaxtrain.sharding import active_rules, gather_param

Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Name -> (sum, weight), float32 scalars; a mean is taken once, at the very end."""

LossFn = Callable[[Any, Mapping[str, jax.Array], Any], Sums]
"""(outputs, batch, params) -> Sums over the rows given, which must not depend on each other.
`params` are what the model is applied to: if it calls `gather_param`, so must the loss."""

# Chunks of scores that are larger than this on a device...
_CHUNK_BYTES = 64 * 2**20
# ... are not cut below so many positions. Every chunk adds to the head's gradient, which moves 8
# bytes per element of the head: on an H100 as long as the products of 400 positions take.
_CHUNK_POSITIONS = 1024

# Finite, so that the gradient of a padding column is 0 and not NaN.
_NEVER = -1e30


def lm_loss(model: Model, *, z_loss: float = 0.0, chunk_bytes: int | None = None) -> LossFn:
    """Makes the next-token cross-entropy of a language model.

    The loss function takes hidden_BTD (what the model returns), a batch with targets [B, T] int32
    and loss_mask [B, T] float32 (weight of each position), and the parameters. "loss" is the sum
    of nll in nats plus the z-loss, and what is differentiated; with z-loss the two parts are also
    given as "nll" and "z_loss", without gradient.

    Scores are float32 whatever the model computes in. Padding columns of the vocabulary get no
    probability and no gradient. Forward and backward pass are one: where a gradient is asked for,
    each chunk's scores become their own gradient at once, so nothing is computed twice. The head
    is gathered before the loop over chunks and its gradient reduced over the mesh after it.

    Args:
      model: has `unembed` and `vocab_size`.
      z_loss: coefficient of log(Z)^2, which keeps scores from drifting (PaLM uses 1e-4).
      chunk_bytes: largest size of the scores on a device; smaller scores are not cut in chunks.
        None: 64 MB or 1,024 positions, whichever is more.
    """
    if model.unembed is None or model.vocab_size is None:
        raise ConfigError("lm_loss needs a language model: one with `unembed` and `vocab_size`.")
    if z_loss < 0:
        raise ConfigError(f"z_loss={z_loss} must not be negative.")
    unembed, vocab_size = model.unembed, model.vocab_size

    def loss_fn(outputs: jax.Array, batch: Mapping[str, jax.Array], params: Any) -> Sums:
        targets_BT, mask_BT = batch["targets"], batch["loss_mask"].astype(jnp.float32)
        _check_shapes(outputs, targets_BT, mask_BT)
        with jax.named_scope("loss"):
            head_DV = gather_param(unembed(params), model.unembed_axes, outputs.dtype)
            plan = _Plan(vocab_size=vocab_size, z_loss=z_loss, softcap=model.logit_softcap)
            plan = _cut_in_chunks(plan, outputs, head_DV, model.unembed_axes[1], chunk_bytes)
            total, nll, z = _cross_entropy(plan, outputs, head_DV, targets_BT, mask_BT)
            weight = jnp.sum(mask_BT)
        sums = {"loss": (total, weight)}
        if z_loss:
            sums |= {"nll": (nll, weight), "z_loss": (z, weight)}
        return sums

    return loss_fn


def classification_loss() -> LossFn:
    """Makes the cross-entropy of a classifier, and its accuracy.

    The loss function takes logits [B, C] and a batch with label [B] int32 and loss_mask [B].
    """

    def loss_fn(outputs: jax.Array, batch: Mapping[str, jax.Array], params: Any) -> Sums:
        del params
        logits_BC = outputs.astype(jnp.float32)
        label_B, mask_B = batch["label"], batch["loss_mask"].astype(jnp.float32)
        if logits_BC.ndim != 2 or not label_B.shape == mask_B.shape == logits_BC.shape[:1]:
            raise ConfigError(
                f"classification_loss needs outputs [rows, classes], label [rows] and loss_mask "
                f"[rows]; got {outputs.shape}, {label_B.shape}, {mask_B.shape}."
            )
        log_probs_BC = jax.nn.log_softmax(logits_BC)
        nll_B = -jnp.take_along_axis(log_probs_BC, label_B[:, None], axis=1)[:, 0]
        right_B = (jnp.argmax(logits_BC, -1) == label_B).astype(jnp.float32)
        weight = jnp.sum(mask_B)
        return {
            "loss": (jnp.sum(nll_B * mask_B), weight),
            "accuracy": (jnp.sum(right_B * mask_B), weight),
        }

    return loss_fn


class _Plan(NamedTuple):
    """How the cross-entropy is computed; hashable, known while tracing."""

    vocab_size: int
    z_loss: float
    softcap: float = 0.0
    """See `Model.logit_softcap`."""
    num_chunks: int = 1
    mesh: Any = None
    """Mesh of the region that is manual over `batch_axes`."""
    batch_axes: tuple[str, ...] = ()
    """() for no such region."""


def _cut_in_chunks(
    plan: _Plan,
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    vocab_axis: str,
    chunk_bytes: int | None,
) -> _Plan:
    """Cuts the length so that the scores of a chunk fit `chunk_bytes` on each device.

    A loop over chunks needs the manual region: without it XLA would add up the head's gradient
    over the devices in every iteration. In a region that is manual already nothing is to be done.
    """
    num_rows, length, _ = hidden_BTD.shape
    num_columns = head_DV.shape[1]
    mesh, batch_axes = None, ()
    active = active_rules()
    if active is not None:
        mesh, rules = active
        context = jax.sharding.get_abstract_mesh()
        manual = () if context.empty else context.manual_axes
        axes = as_axes(rules.compute["batch"]) or ()
        batch_axes = tuple(a for a in axes if mesh.shape[a] > 1 and a not in manual)
        num_rows //= axis_size(mesh, batch_axes)
        num_columns //= axis_size(mesh, rules.compute[vocab_axis])
        mesh = context if manual else mesh
    if chunk_bytes is None:
        chunk_bytes = max(_CHUNK_BYTES, 4 * num_columns * _CHUNK_POSITIONS)
    num_chunks = min(math.ceil(4 * num_rows * length * num_columns / chunk_bytes), length)
    if num_chunks <= 1:
        return plan
    return plan._replace(num_chunks=num_chunks, mesh=mesh, batch_axes=batch_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(plan: _Plan, hidden_BTD, head_DV, targets_BT, mask_BT):
    """Returns the sums (nll + z, nll, z) over all positions."""
    return _by_hand(plan, False)(hidden_BTD, head_DV, targets_BT, mask_BT)[0]


def _cross_entropy_fwd(plan: _Plan, hidden_BTD, head_DV, targets_BT, mask_BT):
    sums, *grads = _by_hand(plan, True)(hidden_BTD, head_DV, targets_BT, mask_BT)
    dtypes = (hidden_BTD.dtype, head_DV.dtype)
    return sums, [grad.astype(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]


def _cross_entropy_bwd(plan: _Plan, grads, cotangents):
    del plan
    # Only "loss" is differentiated, its parts are for the log.
    hidden_grad_BTD, head_grad_DV = ((grad * cotangents[0]).astype(grad.dtype) for grad in grads)
    return hidden_grad_BTD, head_grad_DV, None, None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _by_hand(plan: _Plan, with_grads: bool) -> Callable[..., Any]:
    """`_all_chunks`, in a region that is manual over the mesh axes of the batch if need be."""
    all_chunks = functools.partial(_all_chunks, plan, with_grads)
    if not plan.batch_axes:
        return all_chunks

    def region(*args):
        sums, hidden_grad_BTD, head_grad_DV = all_chunks(*args)
        sums, head_grad_DV = jax.lax.psum((sums, head_grad_DV), plan.batch_axes)
        return sums, hidden_grad_BTD, head_grad_DV

    rows, whole = PartitionSpec(plan.batch_axes), PartitionSpec()
    return jax.shard_map(
        region,
        mesh=plan.mesh,
        in_specs=(rows, whole, rows, rows),
        out_specs=(whole, rows, whole),
        axis_names=set(plan.batch_axes),
        check_vma=False,
    )


def _all_chunks(plan: _Plan, with_grads: bool, hidden_BTD, head_DV, targets_BT, mask_BT):
    """Adds up `_chunk` over the length: (sums, hidden_grad_BTD, head_grad_DV)."""
    if plan.num_chunks == 1:
        return _chunk(plan, with_grads, hidden_BTD, head_DV, targets_BT, mask_BT)
    num_rows, length, width = hidden_BTD.shape
    chunk = math.ceil(length / plan.num_chunks)
    # Matrix units take rows by eights; in a short chunk rounding up would be a large part of it.
    chunk += -chunk % 8 if chunk >= 64 else 0
    num_chunks = math.ceil(length / chunk)

    def cut(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [chunks, B, C, ...]; what is added at the end has no weight."""
        padding = [(0, 0), (0, num_chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding) if num_chunks * chunk > length else x
        return jnp.moveaxis(x.reshape(num_rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

    def add_chunk(carry, chunk):
        sums, head_grad_DV = carry
        new_sums, hidden_grad_BCD, grad_DV = _chunk(plan, with_grads, chunk[0], head_DV, *chunk[1:])
        return jax.tree.map(jnp.add, (sums, head_grad_DV), (new_sums, grad_DV)), hidden_grad_BCD

    zero = jnp.zeros((), jnp.float32)
    start = ((zero, zero, zero), jnp.zeros(head_DV.shape, jnp.float32) if with_grads else None)
    (sums, head_grad_DV), grads = jax.lax.scan(
        add_chunk, start, jax.tree.map(cut, (hidden_BTD, targets_BT, mask_BT))
    )
    if grads is None:
        return sums, None, None
    hidden_grad_BTD = jnp.moveaxis(grads, 0, 1).reshape(num_rows, num_chunks * chunk, width)
    return sums, hidden_grad_BTD[:, :length], head_grad_DV


def _chunk(plan: _Plan, with_grads: bool, hidden_BCD, head_DV, targets_BC, mask_BC):
    """(sums, hidden_grad_BCD, head_grad_DV) of one chunk; None for gradients not asked for."""
    # Positions of all rows in one dim, R: XLA multiplies matrices faster than larger arrays.
    hidden_RD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
    targets_R, mask_R = targets_BC.reshape(-1), mask_BC.reshape(-1)
    scores_RV = jnp.matmul(hidden_RD, head_DV, preferred_element_type=jnp.float32)
    scores_RV = capped_RV = softcap(scores_RV, plan.softcap)
    column_V = jnp.arange(head_DV.shape[1])[None, :]
    if plan.vocab_size < head_DV.shape[1]:
        scores_RV = jnp.where(column_V < plan.vocab_size, scores_RV, _NEVER)
    # A comparison instead of a gather: it stays local where the vocabulary is split.
    is_target_RV = column_V == targets_R[:, None]
    largest_R = jnp.max(scores_RV, -1)
    exp_RV = jnp.exp(scores_RV - largest_R[:, None])
    sum_R = jnp.sum(exp_RV, -1)
    log_z_R = largest_R + jnp.log(sum_R)
    target_R = jnp.sum(jnp.where(is_target_RV, scores_RV, 0), -1)
    nll = jnp.sum((log_z_R - target_R) * mask_R)
    z = plan.z_loss * jnp.sum(jnp.square(log_z_R) * mask_R)
    sums = (nll + z, nll, z)
    if not with_grads:
        return sums, None, None
    scale_R = mask_R * (1 + 2 * plan.z_loss * log_z_R) / sum_R
    grad_RV = exp_RV * scale_R[:, None] - jnp.where(is_target_RV, mask_R[:, None], 0)
    if plan.softcap:
        # The derivative of c * tanh(s / c) is 1 - tanh(s / c)^2.
        grad_RV *= 1 - jnp.square(capped_RV / plan.softcap)
    grad_RV = grad_RV.astype(hidden_RD.dtype)
    hidden_grad_BCD = jnp.einsum("rv,dv->rd", grad_RV, head_DV).reshape(hidden_BCD.shape)
    # Summed over chunks and devices in float32.
    head_grad_DV = jnp.einsum("rd,rv->dv", hidden_RD, grad_RV, preferred_element_type=jnp.float32)
    return sums, hidden_grad_BCD, head_grad_DV


def _check_shapes(outputs: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array) -> None:
    if outputs.ndim != 3 or not targets_BT.shape == mask_BT.shape == outputs.shape[:2]:
        raise ConfigError(
            "lm_loss needs outputs [rows, length, embed], targets and loss_mask [rows, length]; "
            f"got {outputs.shape}, {targets_BT.shape}, {mask_BT.shape}."
        )
