"""LoRA: projections with a low-rank update, a base that does not train, and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import optim
from jaxtrain.config import OptimizerConfig, RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout_audit import audit
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import logits
from jaxtrain.models.lora import is_adapter, merge
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.program import train_program
from jaxtrain.rules import DEFAULT_RULES
from jaxtrain.sharding import shard_batch
from jaxtrain.state import init_state, placed_state
from jaxtrain.tree import named_leaves

pytestmark = pytest.mark.usefixtures("compile_cache")

# Grouped queries, so that no two projections have one shape.
SIZES = TransformerConfig(
    vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48
)
LORA = LoraConfig(rank=4, alpha=6.0, targets="attention/(q|o)|mlp/up", base_dtype="float32")
TARGETS = {"layers/attention/q", "layers/attention/o", "layers/mlp/up"}
LOW_LORA = dataclasses.replace(LORA, base_dtype="bfloat16")


def batch_of(rows=8, length=16):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SIZES.vocab_size, (rows, length + 1)).astype(np.int32)
    mask = (rng.random((rows, length)) < 0.7).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def trained_like(params):
    """Parameters as after some steps: B is not zero."""
    rng = np.random.default_rng(1)

    def change(path, leaf):
        if not is_adapter(jax.tree_util.keystr(path, simple=True, separator="/")):
            return leaf
        return jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, params)


def scores(model, params, tokens):
    def forward(params):
        hidden, _ = model.apply(params, {}, {"tokens": tokens}, key=None, train=False)
        return logits(model, params, hidden)

    return jax.jit(forward)(params)


def initial(model, seed=0):
    return jax.jit(lambda key: model.init(key)[0])(jax.random.key(seed))


def without_lora(params):
    leaves = {path: leaf for path, leaf in named_leaves(params) if not is_adapter(path)}
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def test_step_0_is_the_base_exactly_and_the_base_is_that_of_the_same_seed():
    base, adapted = transformer(SIZES), transformer(SIZES, lora=LORA)
    params, adapted_params = initial(base, 3), initial(adapted, 3)
    assert without_lora(adapted_params).keys() == dict(named_leaves(params)).keys()
    for path, leaf in named_leaves(params):
        np.testing.assert_array_equal(without_lora(adapted_params)[path], leaf, err_msg=path)
    found = {path for path, _ in named_leaves(adapted_params) if is_adapter(path)}
    assert found == {f"{target}/{name}" for target in TARGETS for name in ("lora_a", "lora_b")}
    leaves = dict(named_leaves(adapted_params))
    assert leaves["layers/attention/o/lora_a"].shape == (3, 4, 8, 4)
    assert leaves["layers/attention/o/lora_b"].shape == (3, 4, 32)
    # Of a variance such that x A is about as large as x.
    assert np.std(leaves["layers/mlp/up/lora_a"]) == pytest.approx(32**-0.5, rel=0.2)
    tokens = batch_of()["tokens"]
    np.testing.assert_array_equal(
        scores(base, params, tokens), scores(adapted, adapted_params, tokens)
    )


def test_merged_model_computes_the_same():
    base, adapted = transformer(SIZES), transformer(SIZES, lora=LORA)
    params = trained_like(initial(adapted))
    tokens = batch_of()["tokens"]
    changed = scores(adapted, params, tokens)
    merged = merge(params, LORA)
    assert jax.tree.structure(merged) == jax.tree.structure(initial(base))
    np.testing.assert_allclose(scores(base, merged, tokens), changed, atol=1e-5)
    assert np.abs(changed - scores(base, initial(base), tokens)).max() > 0.01
    # By NumPy, for the projection with two dims of inputs.
    o = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["layers"]["attention"]["o"])
    expected = o["kernel"] + 6.0 / 4 * np.einsum("lnhr,lrd->lnhd", o["lora_a"], o["lora_b"])
    np.testing.assert_allclose(merged["layers"]["attention"]["o"]["kernel"], expected, atol=1e-6)


def test_merge_rounds_to_the_dtype_of_the_base_once():
    params = trained_like(initial(transformer(SIZES, lora=LOW_LORA)))
    up = params["layers"]["mlp"]["up"]
    merged = merge(params, LOW_LORA)["layers"]["mlp"]["up"]["kernel"]
    assert merged.dtype == jnp.bfloat16
    update = np.einsum("ldr,lrf->ldf", np.float64(up["lora_a"]), np.float64(up["lora_b"]))
    exact = np.float64(up["kernel"].astype(jnp.float32)) + 1.5 * update
    error = np.abs(np.float64(merged.astype(jnp.float32)) - exact)
    assert (error <= np.abs(exact) * 2**-8).all()


def loss_and_gradient(model, params, batch):
    """Of the adapters, through the train step's own gradient."""
    from jaxtrain.gradients import make_grad_fn

    mesh = make_mesh("fsdp:1", devices=jax.devices()[:1])
    frozen = optim.frozen_mask(OptimizerConfig(), params, model.frozen)
    grad_fn = make_grad_fn(model, lm_loss(model), mesh, frozen=frozen)
    grads, sums, _ = jax.jit(grad_fn)(params, {}, batch, jax.random.key(0))
    return sums, grads


def test_gradient_is_that_of_the_merged_kernel_by_the_chain_rule():
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW."""
    base, adapted = transformer(SIZES), transformer(SIZES, lora=LORA)
    params = trained_like(initial(adapted))
    batch = batch_of()
    sums, grads = loss_and_gradient(adapted, params, batch)
    merged_sums, merged_grads = loss_and_gradient(base, merge(params, LORA), batch)
    assert float(sums["loss"][0]) == pytest.approx(float(merged_sums["loss"][0]), rel=1e-6)
    assert {path for path, _ in named_leaves(grads)} == {
        path for path, _ in named_leaves(params) if is_adapter(path)
    }
    letters = {"q": ("ld", "lnh"), "o": ("lnh", "ld"), "up": ("ld", "lf")}
    for target, (ins, outs) in letters.items():
        part = "mlp" if target == "up" else "attention"
        a, b = (params["layers"][part][target][n] for n in ("lora_a", "lora_b"))
        of_w = merged_grads["layers"][part][target]["kernel"]
        inside, outside = ins[1:], outs[1:]
        w, r = f"l{inside}{outside}", "r"
        expected_a = 1.5 * np.einsum(f"{w},l{r}{outside}->l{inside}{r}", of_w, b)
        expected_b = 1.5 * np.einsum(f"l{inside}{r},{w}->l{r}{outside}", a, of_w)
        found = grads["layers"][part][target]
        np.testing.assert_allclose(found["lora_a"], expected_a, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found["lora_b"], expected_b, rtol=1e-3, atol=1e-4)


def program_on(mesh_text, config, lora=LOW_LORA):
    sizes = [int(part.partition(":")[2]) for part in mesh_text.split(",")]
    mesh = make_mesh(mesh_text, devices=jax.devices()[: np.prod(sizes)])
    model = transformer(SIZES, lora=lora)
    return train_program(model, lm_loss(model), config, mesh, rules=DEFAULT_RULES), model, mesh


CONFIG = RunConfig(
    num_steps=20,
    global_batch_size=8,
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
)


def losses_on(mesh_text, num_steps=4):
    program, model, mesh = program_on(mesh_text, CONFIG)
    state = init_state(model, program.tx, mesh, seed=0)
    before = without_lora(state.params)
    batch = shard_batch(batch_of(), mesh)
    step = program.compile(batch)
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, batch)
        losses.append(metrics.read()["loss"])
    return losses, before, state


def test_losses_are_equal_on_every_mesh_and_the_base_stays_as_it_was():
    losses, before, state = losses_on("fsdp:1")
    assert losses[-1] < losses[0] - 0.01
    for path, leaf in without_lora(state.params).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    elsewhere, _, _ = losses_on("data:2,fsdp:2,tensor:2")
    np.testing.assert_allclose(elsewhere, losses, rtol=1e-5)


def test_optimizer_state_is_only_as_large_as_the_adapters():
    program, model, mesh = program_on("fsdp:1", CONFIG)
    abstract = placed_state(model, program.tx, mesh)
    adapters = [leaf for path, leaf in named_leaves(abstract.params) if is_adapter(path)]
    moments = [leaf for leaf in jax.tree.leaves(abstract.opt_state) if leaf.shape]
    assert sorted(leaf.shape for leaf in moments) == sorted(2 * [leaf.shape for leaf in adapters])
    assert {str(leaf.dtype) for leaf in [*moments, *adapters]} == {"float32"}
    base = {str(leaf.dtype) for p, leaf in named_leaves(abstract.params) if not is_adapter(p)}
    assert base == {"bfloat16"}
    _, float_model, _ = program_on("fsdp:1", CONFIG, LORA)
    kept = placed_state(float_model, program.tx, mesh).params
    assert {str(leaf.dtype) for _, leaf in named_leaves(kept)} == {"float32"}


def test_own_optimizer_leaves_the_base_alone_too():
    import optax

    model = transformer(SIZES, lora=LORA)
    mesh = make_mesh("fsdp:1", devices=jax.devices()[:1])
    program = train_program(
        model, lm_loss(model), CONFIG, mesh, rules=DEFAULT_RULES, tx=optax.adam(1e-2)
    )
    state = init_state(model, program.tx, mesh, seed=0)
    before = without_lora(state.params)
    batch = shard_batch(batch_of(), mesh)
    state, metrics = program.compile(batch)(state, batch)
    trained = [leaf for path, leaf in named_leaves(state.params) if is_adapter(path)]
    norm = np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in trained))
    np.testing.assert_allclose(metrics.read()["param_norm"], norm, rtol=1e-5)
    for path, leaf in without_lora(state.params).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    assert float(jnp.abs(state.params["layers"]["mlp"]["up"]["lora_b"]).max()) > 0


def test_no_gradient_of_the_base_is_computed():
    """The compiled step has no product with the shape of an adapted kernel, or of the head."""
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(learning_rate=1e-2))
    program, _, mesh = program_on("fsdp:1", config)
    text = program.compile(shard_batch(batch_of(), mesh)).compiled.as_text()
    products = [line for line in text.splitlines() if " dot(" in line or "matmul" in line]
    assert products
    for shape in ("f32[32,64]", "f32[32,128]", "f32[32,48]", "f32[48,32]", "f32[32,32]"):
        assert not any(f"= {shape}" in line for line in products), shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": "atention"}, r"lora\.targets='atention' matches no projection; near paths: l"),
        ({"targets": "head"}, r"lora\.targets='head' matches no projection"),
        (
            {"rank": 17, "targets": "attention/k"},
            r"lora\.rank=17 must be at most 16 for layers/att",
        ),
    ],
)
def test_wrong_targets_and_ranks_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        transformer(SIZES, lora=dataclasses.replace(LORA, **changes))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": -1}, r"rank=-1 must be at least 0"),
        ({"rank": 2, "targets": "("}, r"targets=\( must be a regular expression"),
        ({"alpha": 3.0}, r"lora\.alpha=3\.0 does nothing without LoRA; give lora\.rank"),
    ],
)
def test_wrong_configurations_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**values)


def test_freezing_all_adapters_is_refused():
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(freeze="lora"))
    with pytest.raises(ConfigError, match=r"freeze='lora' matches all 6 parameters that could"):
        program_on("fsdp:1", config)


def test_a_plan_and_the_audit_take_adapters_for_no_accident():
    """B of q has no dim over fsdp, and is a large share of a small model's state."""
    mesh = make_mesh("fsdp:8")
    model = transformer(SIZES, lora=LORA)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    tx = optim.make_optimizer(OptimizerConfig(), params, num_steps=9, frozen=model.frozen)
    assert audit(model, mesh, tx).replicated_share == 0
    with pytest.raises(ConfigError, match=r"replicated on every device .*q/lora_b"):
        audit(dataclasses.replace(model, kept_whole=""), mesh, tx)
