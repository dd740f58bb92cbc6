"""A language model trained with JAX and optax alone, for `bench_step.py` to compare with.

The architecture is that of jaxtrain's `nano` at any size: RMSNorm, rotary positions, causal
attention, SwiGLU, an output layer of its own, float32. Parameters are a plain dict, the step is one
donated `jax.jit`, the optimizer is `optax.adamw`, the loss comes from plain logits. There is no
clipping, no check for non-finite values, no mask and no metric but the loss. What was found to make
jaxtrain's layers fast on CPU is done here too: products of matrices instead of larger arrays, heads
before positions, a softmax that divides last.

Shapes: B batch, T query length, S key length, D embed, F mlp, N heads, H head dim, V vocab,
L layers.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]

Steps = Callable[[int], None]
"""Does so many steps and waits for the last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """How the layers are written down: it changes the program, not the function."""

    is_scanned: bool
    """One loop over stacked layers, or a Python loop over a list of dicts."""
    remat: str
    """none: keep all activations; dots: keep those of matrix products, compute the rest again."""

    @property
    def name(self) -> str:
        """For tables and JSON."""
        return f"{'scanned' if self.is_scanned else 'unrolled'}, remat {self.remat}"


VARIANTS = tuple(
    Variant(is_scanned=is_scanned, remat=remat)
    for is_scanned in (False, True)
    for remat in ("none", "dots")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    vocab_size: int


def init_params(sizes: Sizes, seed: int, *, is_scanned: bool) -> Params:
    """Normal initial values; the layers are a list, or stacked where they are scanned."""
    D, F, V, N = sizes.embed_dim, sizes.mlp_dim, sizes.vocab_size, sizes.num_heads
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 0.02, shape).astype(np.float32)

    layers = [
        {
            **{name: normal(D, N, D // N) for name in "qkv"},
            "o": normal(N, D // N, D),
            "gate": normal(D, F),
            "up": normal(D, F),
            "down": normal(F, D),
            **{name: np.ones(D, np.float32) for name in ("attention_norm", "mlp_norm")},
        }
        for _ in range(sizes.num_layers)
    ]
    params = {
        "embed": normal(V, D),
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if is_scanned else layers,
        "final_norm": np.ones(D, np.float32),
        "head": normal(D, V),
    }
    return jax.tree.map(jnp.array, params)


def make_step(
    sizes: Sizes, variant: Variant, *, learning_rate: float = 1e-3
) -> tuple[Callable[..., Any], Callable[[int], tuple[Params, Any]]]:
    """Makes the compiled step (params, opt_state, batch) -> (params, opt_state, loss), and init.

    The batch holds tokens and targets, [B, T] int32.
    """
    optimizer = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)

    def init(seed: int) -> tuple[Params, Any]:
        params = init_params(sizes, seed, is_scanned=variant.is_scanned)
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: Mapping[str, jax.Array]):
        loss, grads = jax.value_and_grad(_loss)(params, batch, variant)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, init


def fastest(
    sizes: Sizes, batches: Sequence[Mapping[str, np.ndarray]], num_steps: int, *, rounds: int = 5
) -> tuple[str, Steps]:
    """Lets all variants run in turns; returns name and steps of the one with the least median."""
    sides = {variant.name: _steps(sizes, variant, batches) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            begin = time.perf_counter()
            side(num_steps)
            seconds[name].append((time.perf_counter() - begin) / num_steps)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"bare, {name}: {1e3 * median:.1f} ms", flush=True)
    best = min(medians, key=lambda name: medians[name])
    return best, sides[best]


def _steps(sizes: Sizes, variant: Variant, batches: Sequence[Mapping[str, np.ndarray]]) -> Steps:
    """Compiles a variant. Its batches are on the device before any clock runs."""
    step, init = make_step(sizes, variant)
    params, opt_state = init(0)
    names = ("tokens", "targets")
    placed = [jax.device_put({name: batch[name] for name in names}) for batch in batches]

    def steps(num_steps: int) -> None:
        nonlocal params, opt_state
        for index in range(num_steps):
            params, opt_state, loss = step(params, opt_state, placed[index % len(placed)])
        jax.block_until_ready((params, opt_state, loss))

    steps(2)
    return steps


def _loss(params: Params, batch: Mapping[str, jax.Array], variant: Variant) -> jax.Array:
    """Mean negative log-likelihood of the targets, in nats."""
    x_BTD = params["embed"][batch["tokens"]]
    layer = params["layers"] if variant.is_scanned else params["layers"][0]
    cos_TH, sin_TH = _angles(x_BTD.shape[1], head_dim=layer["v"].shape[-1])

    def block(x_BTD: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x_BTD += _attention(layer, _rms_norm(x_BTD, layer["attention_norm"]), cos_TH, sin_TH)
        return x_BTD + _mlp(layer, _rms_norm(x_BTD, layer["mlp_norm"])), None

    if variant.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = jax.checkpoint(block, policy=policy, prevent_cse=not variant.is_scanned)
    if variant.is_scanned:
        x_BTD, _ = jax.lax.scan(block, x_BTD, params["layers"])
    else:
        for layer in params["layers"]:
            x_BTD, _ = block(x_BTD, layer)
    logits_BTV = _matmul(_rms_norm(x_BTD, params["final_norm"]), params["head"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"])
    return jnp.mean(losses)


def _rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x_BTD), -1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean_square + 1e-5) * scale_D


def _angles(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles_TH = jnp.arange(length)[:, None] * frequencies
    return jnp.cos(angles_TH), jnp.sin(angles_TH)


def _rotate(x_BTNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = cos_TH[:, None], sin_TH[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(layer: Params, x_BTD: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    B, T, D = x_BTD.shape
    N, H = layer["q"].shape[1:]
    q_BTNH, k_BSNH, v_BSNH = (
        _matmul(x_BTD, layer[name].reshape(D, N * H)).reshape(B, T, N, H) for name in "qkv"
    )
    q_BTNH, k_BSNH = _rotate(q_BTNH, cos_TH, sin_TH), _rotate(k_BSNH, cos_TH, sin_TH)
    q_BNTH, k_BNSH, v_BNSH = (jnp.swapaxes(a, 1, 2) for a in (q_BTNH, k_BSNH, v_BSNH))
    scores = jnp.einsum("bnth,bnsh->bnts", q_BNTH / H**0.5, k_BNSH)
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -1e30)
    # The sum divides the result, not the probabilities: one pass less over [T, S].
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    a_BNTH = jnp.einsum("bnts,bnsh->bnth", weights, v_BNSH)
    a_BNTH /= jnp.sum(weights, -1, keepdims=True)
    a_BTNH = jnp.swapaxes(a_BNTH, 1, 2)
    return _matmul(a_BTNH.reshape(B, T, N * H), layer["o"].reshape(N * H, D))


def _mlp(layer: Params, x_BTD: jax.Array) -> jax.Array:
    hidden_BTF = jax.nn.silu(_matmul(x_BTD, layer["gate"])) * _matmul(x_BTD, layer["up"])
    return _matmul(hidden_BTF, layer["down"])


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Over rows and positions as one dim: twice as fast on CPU, in the gradient of the kernel."""
    y = x.reshape(-1, x.shape[-1]) @ kernel
    return y.reshape(*x.shape[:-1], -1)
