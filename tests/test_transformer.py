"""The transformer against a plain NumPy float64 reference, and what must not change its result.

Shapes: B batch, T length, D embed, N query heads, K key/value heads, H head dim, L layers.
"""

import dataclasses
import math

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import logits
from jaxtrain.models.transformer import PRESETS, TransformerConfig, transformer
from jaxtrain.sharding import DEFAULT_RULES, param_shardings, use_rules

pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = {"vocab_size": 61, "vocab_multiple": 8, "num_layers": 3, "embed_dim": 24, "mlp_dim": 40}
STYLES = {
    "gpt2": TransformerConfig(
        **SMALL, num_heads=3, activation="gelu", norm="layer", use_bias=True, positions="learned",
        max_length=16, tie_embeddings=True,
    ),
    "llama3": TransformerConfig(
        **SMALL, num_heads=6, num_kv_heads=2, rope_theta=500_000.0, rope_scaling="llama3",
        rope_factor=8.0, rope_original_length=64,
    ),
    "qwen3": TransformerConfig(
        **SMALL, num_heads=4, num_kv_heads=2, head_dim=10, norm_epsilon=1e-6, qk_norm=True,
        rope_theta=1e6, tie_embeddings=True,
    ),
}  # fmt: skip
PARAMETERS = {
    "gpt2": 124_439_808,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
}


# The reference: one row at a time, no shortcuts -----------------------------------------------


def reference_norm(config, x, weights):
    if "bias" in weights:
        x = x - x.mean(-1, keepdims=True)
        return (
            x / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon) * weights["scale"]
            + weights["bias"]
        )
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * weights["scale"]


def reference_rope(config, x_TNH, positions_T):
    """As on Hugging Face: `x * cos + rotate_half(x) * sin`, with Llama 3's frequencies."""
    size = x_TNH.shape[-1]
    frequencies = 1.0 / config.rope_theta ** (np.arange(0, size, 2) / size)
    if config.rope_scaling == "llama3":
        scaled = []
        low = config.rope_original_length / config.rope_low_frequency_factor
        high = config.rope_original_length / config.rope_high_frequency_factor
        for f in frequencies:
            wavelength = 2 * math.pi / f
            if wavelength < high:
                scaled.append(f)
            elif wavelength > low:
                scaled.append(f / config.rope_factor)
            else:
                smooth = (
                    config.rope_original_length / wavelength - config.rope_low_frequency_factor
                ) / (config.rope_high_frequency_factor - config.rope_low_frequency_factor)
                scaled.append((1 - smooth) * f / config.rope_factor + smooth * f)
        assert min(scaled) < min(frequencies)
        frequencies = np.array(scaled)
    angles = positions_T[:, None] * frequencies[None]
    angles = np.concatenate([angles, angles], -1)[:, None, :]
    half = np.concatenate([-x_TNH[..., size // 2 :], x_TNH[..., : size // 2]], -1)
    return x_TNH * np.cos(angles) + half * np.sin(angles)


def reference_attention(config, x_TD, w, positions_T):
    length = len(x_TD)

    def project(name):
        y = np.tensordot(x_TD, w[name]["kernel"], 1)
        return y + w[name]["bias"] if "bias" in w[name] else y

    q, k, v = project("q"), project("k"), project("v")
    if config.qk_norm:
        q, k = reference_norm(config, q, w["q_norm"]), reference_norm(config, k, w["k_norm"])
    if config.positions == "rotary":
        q, k = (reference_rope(config, y, positions_T) for y in (q, k))
    heads = []
    for n in range(config.num_heads):
        kv = n // (config.num_heads // config.kv_heads)
        scores = q[:, n] @ k[:, kv].T / np.sqrt(q.shape[-1])
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv])
    out = np.einsum("tnh,nhd->td", np.stack(heads, 1), w["o"]["kernel"])
    return out + w["o"]["bias"] if "bias" in w["o"] else out


def reference_mlp(config, x_TD, w):
    def linear(x, name):
        y = x @ w[name]["kernel"]
        return y + w[name]["bias"] if "bias" in w[name] else y

    up = linear(x_TD, "up")
    if config.activation == "swiglu":
        gate = linear(x_TD, "gate")
        up = gate / (1 + np.exp(-gate)) * up
    else:
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return linear(up, "down")


def reference_logits(config, params, tokens_T, positions_T=None):
    """Float64 logits of one row, without padding columns."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    positions_T = np.arange(len(tokens_T)) if positions_T is None else positions_T
    x_TD = params["embed"]["embedding"][tokens_T]
    if config.positions == "learned":
        x_TD = x_TD + params["position"]["embedding"][positions_T]
    for index in range(config.num_layers):
        w = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        normed = reference_norm(config, x_TD, w["attention_norm"])
        x_TD = x_TD + reference_attention(config, normed, w["attention"], positions_T)
        x_TD = x_TD + reference_mlp(config, reference_norm(config, x_TD, w["mlp_norm"]), w["mlp"])
    x_TD = reference_norm(config, x_TD, params["final_norm"])
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return (x_TD @ head)[:, : config.vocab_size]


# ----------------------------------------------------------------------------------------------


def random_params(model, seed=0):
    """Random values everywhere: ones and zeros in norms and biases would hide mistakes."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    values = [(0.3 * rng.normal(size=leaf.shape)).astype(np.float32) for leaf in leaves]
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(treedef, values))


def tokens_of(config, rows=2, length=12, seed=1):
    shape = (rows, length)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def forward(model, params, **batch):
    hidden, _ = jax.jit(lambda p, b: model.apply(p, {}, b, key=None, train=True))(params, batch)
    return np.asarray(logits(model, params, hidden))


@pytest.mark.parametrize("style", STYLES)
def test_logits_equal_the_numpy_reference(style):
    config = STYLES[style]
    model = transformer(config)
    params, tokens = random_params(model), tokens_of(config)
    ours = forward(model, params, tokens=tokens)
    for row in range(len(tokens)):
        expected = reference_logits(config, params, tokens[row])
        np.testing.assert_allclose(ours[row], expected, rtol=2e-4, atol=2e-4)
        assert np.abs(expected).max() > 1


@pytest.mark.parametrize("style", ["gpt2", "llama3"])
def test_given_positions_are_used(style):
    config = STYLES[style]
    model = transformer(config)
    params, tokens = random_params(model), tokens_of(config)
    positions = np.array([[*range(3, 15)], [0, 1, 2, 3] * 3], np.int32)
    ours = forward(model, params, tokens=tokens, positions=positions)
    for row in range(len(tokens)):
        expected = reference_logits(config, params, tokens[row], positions[row])
        np.testing.assert_allclose(ours[row], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    config = TransformerConfig(**PRESETS[name])
    model = transformer(config)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params)) - model.num_padding_params
    assert count == PARAMETERS[name]
    assert state == {}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert config.dropout == 0
    assert params["embed"]["embedding"].shape[0] % 128 == 0


def test_nano_is_the_default_of_about_a_million_parameters():
    config = TransformerConfig(**PRESETS["nano"])
    assert config == TransformerConfig()
    assert (config.num_layers, config.embed_dim, config.vocab_size) == (4, 128, 256)
    params, _ = jax.eval_shape(transformer(config).init, jax.random.key(0))
    assert 0.8e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 1.2e6


def test_names_shapes_and_logical_axes():
    config = dataclasses.replace(STYLES["qwen3"], tie_embeddings=False, use_bias=True)
    model = transformer(config)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    attention = params["layers"]["attention"]
    assert params["embed"]["embedding"].shape == (64, 24)
    assert attention["q"]["kernel"].shape == (3, 24, 4, 10)
    assert attention["k"]["kernel"].shape == attention["v"]["kernel"].shape == (3, 24, 2, 10)
    assert attention["o"]["kernel"].shape == (3, 4, 10, 24)
    assert attention["q_norm"]["scale"].shape == attention["k_norm"]["scale"].shape == (3, 10)
    assert params["layers"]["mlp"]["gate"]["kernel"].shape == (3, 24, 40)
    assert params["layers"]["mlp"]["down"]["kernel"].shape == (3, 40, 24)
    assert params["layers"]["attention_norm"]["scale"].shape == (3, 24)
    assert params["head"]["kernel"].shape == (24, 64)
    axes = model.logical_axes
    assert jax.tree.structure(params) == jax.tree.structure(
        axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    assert axes["layers"]["attention"]["o"]["kernel"] == ("layers", "heads", "head_dim", "embed")
    assert axes["layers"]["attention"]["k"]["bias"] == ("layers", "kv_heads", "head_dim")
    assert axes["layers"]["mlp"]["up"]["kernel"] == ("layers", "embed", "mlp")
    assert axes["head"]["kernel"] == ("embed", "vocab")
    learned = transformer(STYLES["gpt2"]).logical_axes
    assert learned["position"]["embedding"] == ("length", "embed")


def test_no_position_sees_a_later_one():
    """By gradient: the output at t depends on the embedding of position s only if s <= t."""
    config = STYLES["gpt2"]
    model = transformer(config)
    params, tokens = random_params(model), tokens_of(config, rows=1, length=8)

    def outputs(table_PD):
        changed = {**params, "position": {"embedding": table_PD}}
        hidden, _ = model.apply(changed, {}, {"tokens": tokens}, key=None, train=True)
        return hidden[0].sum(-1)

    jacobian_TPD = jax.jacrev(outputs)(params["position"]["embedding"])
    influence = np.abs(np.asarray(jacobian_TPD)).sum(-1)[:, :8]
    assert (np.triu(influence, 1) == 0).all()
    assert (influence[np.tril_indices(8)] > 0).all()


def grads_of(model, params, tokens):
    def loss(params):
        hidden, _ = model.apply(params, {}, {"tokens": tokens}, key=None, train=True)
        return jnp.sum(jnp.square(logits(model, params, hidden)))

    return jax.jit(jax.grad(loss)), params


def test_remat_and_unrolling_give_the_same_gradients():
    config = dataclasses.replace(STYLES["qwen3"], num_layers=2)
    tokens = tokens_of(config)
    params = random_params(transformer(config))
    compiled = {}
    for remat, unroll in (("none", 1), ("none", 2), ("dots", 1), ("full", 1), ("full", 2)):
        model = transformer(dataclasses.replace(config, scan_unroll=unroll), remat=remat)
        grad, _ = grads_of(model, params, tokens)
        compiled[remat, unroll] = grad.lower(params).compile()
    reference = compiled["none", 1](params)
    for program in compiled.values():
        for ours, expected in zip(
            jax.tree.leaves(program(params)), jax.tree.leaves(reference), strict=True
        ):
            error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
            assert error < 1e-5
    # The policies do something: what is computed again costs FLOPs.
    flops = {key: program.cost_analysis()["flops"] for key, program in compiled.items()}
    assert flops["full", 2] > 1.05 * flops["none", 2]
    dots = {
        remat: str(
            jax.make_jaxpr(grads_of(transformer(config, remat=remat), params, tokens)[0])(params)
        )
        for remat in ("none", "dots", "full")
    }
    assert "remat" not in dots["none"]
    assert dots["full"].count("dot_general") > dots["dots"].count("dot_general")
    assert "while" in compiled["none", 1].as_text()
    assert "while" not in compiled["none", 2].as_text()


def test_rematerialisation_adds_nothing_up_twice_over_devices(monkeypatch):
    """Where devices split a layer, what they have added up is kept."""
    config = dataclasses.replace(STYLES["qwen3"], num_layers=2, scan_unroll=1, num_heads=4)
    mesh = make_mesh("tensor:2", devices=jax.devices()[:2])
    tokens = tokens_of(config)

    def repeated():
        model = transformer(config, remat="full")
        abstract, _ = jax.eval_shape(model.init, jax.random.key(0))
        shardings = param_shardings(abstract, model.logical_axes, mesh)
        params = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
        )

        def grads(params):
            with use_rules(mesh):
                return grads_of(model, params, tokens)[0](params)

        found = hlo.reductions(jax.jit(grads).lower(params).compile().as_text(), mesh, "tensor")
        assert len(found) >= 4, "the layers must be split"
        return ["rematted_computation" in c.op_name for c in found].count(True)

    assert repeated() == 0
    monkeypatch.setattr("jaxtrain.compile.has_split_layers", lambda: False)
    assert repeated() == 1


def test_automatic_unrolling_is_for_few_layers_on_cpu():
    for num_layers, unroll in ((3, 3), (9, 1)):
        config = dataclasses.replace(STYLES["qwen3"], num_layers=num_layers)
        model = transformer(config)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        program = jax.make_jaxpr(
            lambda p, m=model, c=config: m.apply(
                p, {}, {"tokens": tokens_of(c)}, key=None, train=True
            )
        )(params)
        scans = [e for e in equations(program.jaxpr) if e.primitive.name == "scan"]
        assert [scan.params["unroll"] for scan in scans] == [unroll]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_bfloat16_computes_products_in_bfloat16_and_the_rest_in_float32():
    config = STYLES["qwen3"]
    model = transformer(config, precision="bfloat16")
    params, tokens = random_params(model), tokens_of(config)

    def apply(params):
        return model.apply(params, {}, {"tokens": tokens}, key=None, train=True)[0]

    found = {}
    for equation in equations(jax.make_jaxpr(apply)(params).jaxpr):
        dtypes = {var.aval.dtype.name for var in equation.invars if hasattr(var.aval, "dtype")}
        found.setdefault(equation.primitive.name, set()).update(dtypes)
    assert found["dot_general"] == {"bfloat16"}
    for name in ("exp", "rsqrt", "reduce_max", "reduce_sum", "cos", "sin", "square"):
        if name in found:
            assert found[name] == {"float32"}, name
    assert {"exp", "rsqrt", "reduce_sum", "cos"} <= set(found)
    hidden = apply(params)
    assert hidden.dtype == jnp.bfloat16
    assert logits(model, params, hidden).dtype == jnp.float32
    low = np.asarray(logits(model, params, hidden))
    full = forward(transformer(config), params, tokens=tokens)
    assert np.linalg.norm(low - full) / np.linalg.norm(full) < 0.05


DROPOUT = dataclasses.replace(STYLES["gpt2"], dropout=0.5, num_layers=2)


def dropped(model, params, tokens, **batch):
    hidden, _ = model.apply(
        params, {}, {"tokens": tokens, **batch}, key=jax.random.key(3), train=True
    )
    return hidden


def test_dropout_masks_belong_to_rows():
    """Case E4: identical rows, other masks; the same on 8 devices and in micro-batches."""
    model = transformer(DROPOUT)
    params = random_params(model)
    tokens = np.repeat(tokens_of(DROPOUT, rows=1), 8, 0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(8))
    run = jax.jit(lambda p, b: dropped(model, p, **b))
    batch = {"tokens": tokens, "row_key": keys}
    one = np.asarray(run(params, batch))
    assert len(np.unique(one.reshape(8, -1).round(4), axis=0)) == 8
    rows = jax.sharding.NamedSharding(make_mesh("data:8"), jax.sharding.PartitionSpec("data"))
    np.testing.assert_allclose(one, run(params, jax.device_put(batch, rows)), rtol=1e-4, atol=1e-4)
    halves = [run(params, jax.tree.map(lambda x, m=m: x[4 * m : 4 * m + 4], batch)) for m in (0, 1)]
    np.testing.assert_allclose(one, np.concatenate(halves), rtol=1e-4, atol=1e-4)
    other = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(8), jnp.arange(8))
    assert not np.allclose(one, run(params, {"tokens": tokens, "row_key": other}), atol=0.1)
    evaluated, _ = model.apply(params, {}, batch, key=None, train=False)
    assert len(np.unique(np.asarray(evaluated).reshape(8, -1).round(4), axis=0)) == 1
    with pytest.raises(ConfigError, match="needs a key"):
        model.apply(params, {}, {"tokens": tokens}, key=None, train=True)


def test_dropout_sites_and_rate():
    """Each layer has masks of its own, and the expected output is the input."""
    from jaxtrain.models.layers import dropout

    keys = jax.random.split(jax.random.key(0), 8)
    x = jnp.ones((8, 64))
    masks = [np.asarray(dropout(x, keys, site, 0.5)) for site in range(5)]
    assert len(np.unique(np.stack(masks).reshape(40, 64), axis=0)) == 40
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert abs(np.mean(masks) - 1) < 0.1
    assert dropout(x, None, 0, 0.5) is x


SPLIT_LENGTH = dataclasses.replace(
    DEFAULT_RULES,
    compute={
        **DEFAULT_RULES.compute,
        "length": "tensor",
        "heads": None,
        "kv_heads": None,
        "mlp": None,
    },
)


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("fsdp:8", DEFAULT_RULES),
        ("data:2,fsdp:2,tensor:2", DEFAULT_RULES),
        ("data:2,fsdp:2,tensor:2", SPLIT_LENGTH),
    ],
)
def test_every_layout_gives_the_same_hidden_states(mesh, rules):
    config = dataclasses.replace(STYLES["llama3"], num_heads=4, embed_dim=32)
    model = transformer(config)
    params, tokens = random_params(model), tokens_of(config, rows=8)
    expected = forward(model, params, tokens=tokens)
    mesh = make_mesh(mesh)

    @jax.jit
    def apply(params, tokens):
        with use_rules(mesh, rules):
            return model.apply(params, {}, {"tokens": tokens}, key=None, train=True)[0]

    placed = jax.device_put(params, param_shardings(params, model.logical_axes, mesh, rules))
    hidden = np.asarray(apply(placed, tokens))
    np.testing.assert_allclose(logits(model, params, hidden), expected, rtol=1e-4, atol=1e-4)


def test_padding_of_the_vocabulary_is_left_out():
    model = transformer(STYLES["qwen3"])
    params = random_params(model)
    assert params["embed"]["embedding"].shape == (64, 24)
    assert model.num_padding_params == 3 * 24
    assert transformer(STYLES["llama3"]).num_padding_params == 2 * 3 * 24
    assert forward(model, params, tokens=tokens_of(STYLES["qwen3"])).shape[-1] == 61


def test_initial_logits_are_small_and_the_residual_stream_does_not_grow():
    config = TransformerConfig(num_layers=8)
    model = transformer(config)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    scores = forward(model, params, tokens=tokens_of(config, length=32))
    assert scores.std() < 0.5
    kernels = params["layers"]["mlp"]
    assert abs(np.std(kernels["up"]["kernel"]) - 0.02) < 0.001
    assert abs(np.std(kernels["down"]["kernel"]) - 0.02 / 4) < 0.0005
    first, second = kernels["up"]["kernel"][:2]
    assert not np.allclose(first, second)


def test_flops_per_token_count_what_multiplies():
    config = TransformerConfig(**PRESETS["gpt2"])
    model = transformer(config)
    multiplied = PARAMETERS["gpt2"] - 1024 * 768
    assert model.flops_per_token is not None
    assert model.flops_per_token(1024) == 6 * multiplied + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"embed_dim": 100, "num_heads": 3}, "embed_dim=100 is not divisible by num_heads=3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"head_dim": 5}, "even head size; got 5"),
        ({"rope_scaling": "llama3", "rope_low_frequency_factor": 4.0}, "must be below"),
        ({"activation": "relu"}, "gelu"),
        ({"positions": "learned", "rope_theta": 3.0}, "rope_theta"),
    ],
)
def test_bad_configurations_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        TransformerConfig(**changes)


def test_bad_calls_are_refused():
    model = transformer(STYLES["gpt2"])
    params = jax.eval_shape(model.init, jax.random.key(0))[0]
    with pytest.raises(ConfigError, match="17 tokens do not fit the 16 learned positions"):
        model.apply(params, {}, {"tokens": np.zeros((1, 17), np.int32)}, key=None, train=False)
    with pytest.raises(ConfigError, match=r"tokens must be \[rows, length\]"):
        model.apply(params, {}, {"tokens": np.zeros(17, np.int32)}, key=None, train=False)
    with pytest.raises(ConfigError, match="attention='flash' does not exist"):
        transformer(STYLES["gpt2"], attention="flash")
    with pytest.raises(ConfigError, match="needs a language model"):
        logits(dataclasses.replace(model, unembed=None), params, jnp.zeros((1, 1, 24)))
