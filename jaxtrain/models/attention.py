"""Causal self-attention: rotary positions, grouped queries, q/k-norm, windows, key/value cache.

Shapes: B batch, T query length, S key length, D embed, N query heads, K key/value heads,
G query heads per key/value head (N = K * G), M queries per key/value head (T * G), H head dim.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.compile import asked_attention, target_device
from jaxtrain.models.layers import Norm, Projection, normal, residual_init, softcap
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.sharding import constrain, on_shards

# Finite, so that a difference of two masked scores is 0 and not NaN.
_MASKED = -1e30


class Cache(NamedTuple):
    """Keys and values; slot s of a row holds its token at position s.

    Stacked [L, B, K, S, H], or in each field a tuple of [B, K, S, H], one for each layer. A layer
    may be given its own alone. Heads come before slots, as products want them: otherwise the whole
    cache would be transposed for every token.
    """

    keys: Any
    values: Any

    def stacked(self) -> "Cache":
        """All layers in one array."""
        return Cache(*(jnp.stack(x) if isinstance(x, tuple) else x for x in self))

    def apart(self) -> "Cache":
        """An array for each layer."""
        return Cache(*map(tuple, self))


class Attention(nnx.Module):
    """Multi-head attention with its four projections."""

    def __init__(self, config: TransformerConfig, implementation: str, *, rngs: nnx.Rngs):
        embed = (("embed", config.embed_dim),)
        head = ("head_dim", config.head_size)
        heads, kv_heads = (("heads", config.num_heads), head), (("kv_heads", config.kv_heads), head)
        self.config, self.implementation = config, implementation
        qkv_bias = config.use_bias or config.qkv_bias

        def project(outputs):
            return Projection(embed, outputs, use_bias=qkv_bias, init=normal(), rngs=rngs)

        self.q, self.k, self.v = project(heads), project(kv_heads), project(kv_heads)
        self.o = Projection(
            heads, embed,
            use_bias=config.use_bias, init=residual_init(config.num_layers), rngs=rngs,
        )  # fmt: skip
        if config.qk_norm:
            kind = "rms" if config.norm == "layer" else config.norm
            over_q, over_k = (heads, kv_heads) if config.qk_norm_over == "heads" else ((head,),) * 2
            self.q_norm, self.k_norm = (
                Norm(kind, axes, epsilon=config.norm_epsilon, rngs=rngs)
                for axes in (over_q, over_k)
            )

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: "Rotation | None",
        layer: jax.Array,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of every position to itself and those before it, of its segment if given."""
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, rotation)
        masking = masking_of(self.config, has_segments=segment_ids_BT is not None)
        implementation, _ = asked_attention(
            self.implementation, target_device(), q_BTNH.dtype, q_BTNH.shape[-1], masking=masking
        )
        with jax.named_scope("attend"):
            if implementation == "cudnn":
                a_BTNH = _attend_cudnn(q_BTNH, k_BTKH, v_BTKH, self.config.score_scale)
            else:
                index_T = jnp.arange(x_BTD.shape[1])
                visible_BTS = self._visible(index_T[:, None], index_T[None, :], layer)[None]
                if segment_ids_BT is not None:
                    visible_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
                k_BKTH, v_BKTH = jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2)
                a_BTNH = self._attend(q_BTNH, k_BKTH, v_BKTH, visible_BTS)
        return self.o(constrain(a_BTNH, "batch", "length", "heads", "head_dim"))

    def decode(
        self,
        x_BTD: jax.Array,
        rotation: "Rotation | None",
        cache: Cache,
        layer: jax.Array,
        positions_BT: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Writes the new keys and values at their positions and attends to the cache."""
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, rotation)
        rows_B1 = jnp.arange(x_BTD.shape[0])[:, None]
        is_stacked = cache.keys.ndim == 5

        def put(slots: jax.Array, new_BTKH: jax.Array) -> jax.Array:
            own = (rows_B1, slice(None), positions_BT)
            return slots.at[(layer, *own) if is_stacked else own].set(new_BTKH.astype(slots.dtype))

        def own_layer(slots: jax.Array) -> jax.Array:
            if is_stacked:
                slots = jax.lax.dynamic_index_in_dim(slots, layer, keepdims=False)
            return slots.astype(x_BTD.dtype)

        cache = Cache(put(cache.keys, k_BTKH), put(cache.values, v_BTKH))
        keys_BKSH, values_BKSH = map(own_layer, cache)
        # Slots past a query's position hold nothing yet, or the padding of a prompt.
        slots_S = jnp.arange(keys_BKSH.shape[2])
        visible_BTS = self._visible(positions_BT[:, :, None], slots_S[None, None, :], layer)
        return self.o(self._attend(q_BTNH, keys_BKSH, values_BKSH, visible_BTS)), cache

    def _visible(self, query: jax.Array, key: jax.Array, layer: jax.Array) -> jax.Array:
        """Whether a query at one position sees a key at another, in this layer."""
        window, every = self.config.window, self.config.full_attention_every
        seen = query >= key
        return seen & ((query - key < window) | ~is_local(every, layer)) if window else seen

    def _attend(self, q_BTNH, k_BKSH, v_BKSH, visible_BTS) -> jax.Array:
        return attend(
            q_BTNH, k_BKSH, v_BKSH, visible_BTS,
            scale=self.config.score_scale, cap=self.config.attention_softcap,
        )  # fmt: skip

    def _project(self, x_BTD: jax.Array, rotation: "Rotation | None"):
        q_BTNH = constrain(self.q(x_BTD), "batch", "length", "heads", "head_dim")
        k_BTKH = constrain(self.k(x_BTD), "batch", "length", "kv_heads", "head_dim")
        v_BTKH = constrain(self.v(x_BTD), "batch", "length", "kv_heads", "head_dim")
        if self.config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if rotation is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)
        return q_BTNH, k_BTKH, v_BTKH


def masking_of(config: TransformerConfig, *, has_segments: bool) -> str:
    """What attention has to respect, in the words of `compile.MASKINGS`."""
    if has_segments:
        return "segments"
    if config.window:
        return "window"
    return "capped" if config.attention_softcap else "causal"


def is_local(every: int, layer: jax.Array) -> jax.Array:
    """Whether a layer has the window of its model, if every n-th has none; bool scalar."""
    return (layer + 1) % every != 0 if every else jnp.array(True)


def _attend_cudnn(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, scale: float
) -> jax.Array:
    """cuDNN's causal attention on what each device holds: JAX cannot split it in a region that is
    manual over only some mesh axes."""
    q_axes = ("batch", "length", "heads", "head_dim")
    kv_axes = ("batch", "length", "kv_heads", "head_dim")

    def local(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, scale=scale, is_causal=True, implementation="cudnn"
        )

    return on_shards(local, (q_axes, kv_axes, kv_axes), q_axes)(q_BTNH, k_BTKH, v_BTKH)


def attend(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    visible_BTS: jax.Array,
    *,
    scale: float,
    cap: float = 0.0,
) -> jax.Array:
    """Softmax attention in plain XLA; scores and softmax in float32.

    The sum of a row's exponentials divides the result instead of the probabilities: one pass less
    over [T, S], measured 5 % of a training step on CPU.

    Args:
        q_BTNH: queries.
        k_BKSH: keys.
        v_BKSH: values.
        visible_BTS: which keys a query sees, at least one; B or T may be 1.
        scale: what scores are multiplied with.
        cap: their limit, see `softcap`; 0: none.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    G = N // K
    # M = T * G, all queries of a key/value head: a product that sums over one dim instead of T and
    # G needs no transposed copy of the scores, a third of the attention's time on CPU.
    q_BTKGH = (q_BTNH * scale).reshape(B, T, K, G, H)
    q_BKMH = jnp.swapaxes(q_BTKGH, 1, 2).reshape(B, K, T * G, H)
    scores = jnp.einsum("bkmh,bksh->bkms", q_BKMH, k_BKSH, preferred_element_type=jnp.float32)
    scores = softcap(scores, cap)
    scores = jnp.where(jnp.repeat(visible_BTS, G, axis=1)[:, None], scores, _MASKED)
    # The maximum cancels in the quotient: it needs no gradient.
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - largest)
    a_BKMH = jnp.einsum(
        "bkms,bksh->bkmh", weights.astype(v_BKSH.dtype), v_BKSH,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    a_BKMH /= jnp.sum(weights, -1, keepdims=True)
    a_BTKGH = jnp.swapaxes(a_BKMH.astype(q_BTNH.dtype).reshape(B, K, T, G, H), 1, 2)
    return a_BTKGH.reshape(B, T, N, H)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of rotary positions, float32."""

    cos_BTH: jax.Array
    sin_BTH: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerRotation:
    """Angles of rotary positions, which layers with a window may have of their own."""

    config: TransformerConfig
    whole: Rotation
    local: Rotation | None = None

    @classmethod
    def make(cls, config: TransformerConfig, positions_BT: jax.Array) -> "LayerRotation":
        """The angles of some positions."""
        local = rotation(config, positions_BT, local=True) if config.rope_local_theta else None
        return cls(config, rotation(config, positions_BT), local)

    def of(self, layer: jax.Array) -> Rotation:
        """Those of one layer."""
        if self.local is None:
            return self.whole
        has_window = is_local(self.config.full_attention_every, layer)
        return jax.tree.map(lambda a, b: jnp.where(has_window, a, b), self.local, self.whole)


def rotation(
    config: TransformerConfig, positions_BT: jax.Array, *, local: bool = False
) -> Rotation:
    """Angles for `rotate`; the last dim is half a head."""
    frequencies = rope_frequencies(config, local=local)
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (h, h + H/2), the order of the weights on Hugging Face, in float32."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = (part[:, :, None] for part in rotation)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def rope_frequencies(config: TransformerConfig, *, local: bool = False) -> np.ndarray:
    """Radians per position of each pair, scaled where asked for; `local`: of layers with a window.

    Local ones have a theta of their own and no scaling (Gemma 3).
    """
    half = np.arange(0, config.head_size, 2) / config.head_size
    if local:
        return (config.rope_local_theta**-half).astype(np.float32)
    frequencies = config.rope_theta**-half
    if config.rope_scaling == "linear":
        frequencies = frequencies / config.rope_factor
    if config.rope_scaling == "llama3":
        # Wavelengths as shares of the original context: short ones stay, long ones are stretched.
        turns = config.rope_original_length * frequencies / (2 * np.pi)
        low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_factor)
    return frequencies.astype(np.float32)
