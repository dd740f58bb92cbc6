"""Packed rows in the model: a document is computed as if it were alone, on every layout.

Shapes: B rows, T length.
"""

import dataclasses
import functools
import re

import experimenting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stepping
from test_transformer import SPLIT_LENGTH, STYLES, forward, random_params, reference_logits

import jaxtrain
from jaxtrain.compile import ATTENTION_KERNELS, asked_attention, attention_cost
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.errors import ConfigError
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import ATTENTION_IMPLEMENTATIONS, transformer
from jaxtrain.sharding import DEFAULT_RULES, param_shardings, use_rules

pytestmark = pytest.mark.usefixtures("compile_cache")

# Sizes that every mesh below divides.
MODEL = dataclasses.replace(STYLES["llama3"], num_layers=2, num_heads=4, embed_dim=32)
LENGTHS = (5, 9, 2, 16, 1, 7, 12, 3, 4, 8, 16, 6, 11, 2, 9, 14, 10, 3, 16, 5)
LENGTH = 16


def documents_of(config, lengths=LENGTHS, seed=0):
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, sum(lengths))
    return Documents(tokens.astype(np.int32), np.cumsum([0, *lengths]))


def packed(config, num_rows=None, **options):
    """(dataset, its first rows)."""
    data = PackedDataset(documents_of(config), LENGTH, end_of_document=0, **options)
    return data, data.read(np.arange(num_rows or len(data)))


def value_and_grads(model, batch, params, mesh=None, rules=DEFAULT_RULES):
    """(loss, gradients, hidden states) of a batch."""
    loss_fn = lm_loss(model)

    def loss(params, batch):
        hidden, _ = model.apply(params, {}, batch, key=None, train=True)
        return loss_fn(hidden, batch, params)["loss"][0], hidden

    def run(params, batch):
        if mesh is None:
            return jax.value_and_grad(loss, has_aux=True)(params, batch)
        with use_rules(mesh, rules):
            return jax.value_and_grad(loss, has_aux=True)(params, batch)

    if mesh is not None:
        params = jax.device_put(params, param_shardings(params, model.logical_axes, mesh, rules))
    (value, hidden), grads = _compiled(run, model, mesh, str(rules), tuple(batch))(params, batch)
    return jax.device_get((value, grads, hidden))


@functools.cache
def _programs():
    return {}


def _compiled(run, *key):
    return _programs().setdefault(key, jax.jit(run))


def assert_equal(ours, expected):
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))


# One document does not see another


LAYOUTS = {
    "one device": (None, DEFAULT_RULES),
    "fsdp:4,tensor:2": ("fsdp:4,tensor:2", DEFAULT_RULES),
    "length over tensor": ("fsdp:4,tensor:2", SPLIT_LENGTH),
}


def two_documents(config, first_seed):
    """8 rows of two documents and padding; only the second one counts."""
    split, end = 6, 13
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, config.vocab_size, (8, LENGTH)).astype(np.int32)
    first = np.random.default_rng(first_seed).integers(0, config.vocab_size, (8, split))
    tokens[:, :split] = first
    index = np.arange(LENGTH)
    segments = 1 * (index < split) + 2 * ((index >= split) & (index < end))
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "loss_mask": np.tile((segments == 2).astype(np.float32), (8, 1)),
        "segment_ids": np.tile(segments.astype(np.int32), (8, 1)),
        "positions": np.tile(np.where(index < split, index, index - split) % LENGTH, (8, 1)),
    }
    return dict(batch, positions=batch["positions"].astype(np.int32)), slice(split, end)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ATTENTION_KERNELS)
def test_another_first_document_leaves_the_second_bit_equal(attention, layout):
    """Each implementation on offer keeps documents apart exactly, or refuses to run."""
    model = transformer(MODEL, attention=attention)
    params = random_params(model)
    mesh, rules = LAYOUTS[layout]
    mesh = mesh and make_mesh(mesh)
    (one, second), (other, _) = (two_documents(MODEL, seed) for seed in (1, 2))
    assert (one["tokens"] != other["tokens"]).any()
    if not ATTENTION_KERNELS[attention].respects_segments:
        with pytest.raises(ConfigError, match=f"attention='{attention}' cannot keep the documents"):
            value_and_grads(model, one, params, mesh, rules)
        return
    before, after = (value_and_grads(model, batch, params, mesh, rules) for batch in (one, other))
    assert before[0] == after[0] > 1
    assert_equal(after[1], before[1])
    np.testing.assert_array_equal(after[2][:, second], before[2][:, second])
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(before[1]))
    if mesh is not None:
        return
    # Without ids the second document does see the first: the comparison can fail.
    for batch in (one, other):
        del batch["segment_ids"]
    before, after = (value_and_grads(model, batch, params, mesh, rules) for batch in (one, other))
    assert before[0] != after[0]


@pytest.mark.parametrize(("precision", "scan_unroll"), [("float32", 1), ("bfloat16", 2)])
def test_rematerialised_and_scanned_layers_keep_documents_apart(precision, scan_unroll):
    config = dataclasses.replace(MODEL, scan_unroll=scan_unroll)
    model = transformer(config, precision=precision, remat="full")
    params = random_params(model)
    found = [value_and_grads(model, two_documents(config, s)[0], params)[:2] for s in (1, 2)]
    assert_equal(found[0], found[1])


# A packed document is the document alone


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["split", "best_fit"])
def test_packed_logits_equal_the_numpy_reference_of_each_document(style, policy):
    config = STYLES[style]
    model = transformer(config)
    params = random_params(model)
    data, rows = packed(config, policy=policy)
    names = ("tokens", "positions", "segment_ids")
    ours = forward(model, params, **{name: rows[name] for name in names})
    num_checked = 0
    for row in range(len(data)):
        for segment in range(1, rows["segment_ids"][row].max() + 1):
            at = rows["segment_ids"][row] == segment
            expected = reference_logits(config, params, rows["tokens"][row, at])
            np.testing.assert_allclose(ours[row, at], expected, rtol=3e-4, atol=3e-4)
            num_checked += at.sum()
    assert num_checked == sum(LENGTHS)


@pytest.mark.parametrize(
    "style",
    [
        "llama3",
        *(pytest.param(style, marks=pytest.mark.long) for style in STYLES if style != "llama3"),
    ],
)
def test_packed_rows_train_like_one_document_in_each_row(style):
    config = STYLES[style]
    model = transformer(config)
    params = random_params(model)
    data, rows = packed(config)
    alone = {
        name: np.concatenate([part[name] for part in single_rows(config)])
        for name in ("tokens", "targets", "loss_mask")
    }
    assert len(data) < len(LENGTHS) / 1.5
    value, grads, _ = value_and_grads(model, rows, params)
    expected_value, expected_grads, _ = value_and_grads(model, alone, params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    # The gradient of a bias of all keys is 0, but for rounding.
    smallest = 1e-6 * max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected_grads))
    for ours, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(ours - expected) < 1e-4 * np.linalg.norm(expected) + smallest


def single_rows(config):
    """Each document in a row of its own: no segments, positions from 0."""
    whole = documents_of(config)
    for start, stop in zip(whole.starts[:-1], whole.starts[1:], strict=True):
        size = stop - start
        row = {
            "tokens": np.zeros((1, LENGTH), np.int32),
            "targets": np.zeros((1, LENGTH), np.int32),
            "loss_mask": np.zeros((1, LENGTH), np.float32),
        }
        row["tokens"][0, :size] = whole.tokens[start:stop]
        row["targets"][0, :size] = [*whole.tokens[start + 1 : stop], 0]
        row["loss_mask"][0, :size] = 1
        yield row


@functools.cache
def trained(layout, with_segments=True):
    """States and metrics of two steps on 32 packed rows."""
    model = transformer(MODEL)
    _, rows = packed(MODEL, 8, policy="split")
    rows = jax.tree.map(lambda array: np.concatenate([array] * 4), rows)
    if not with_segments:
        rows = {name: rows[name] for name in ("tokens", "targets", "loss_mask")}
    tx = optax.sgd(0.1)
    return stepping.run(model, lm_loss(model), tx, stepping.LAYOUTS[layout], [rows, rows])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp:8", marks=pytest.mark.long),
        pytest.param(stepping.HYBRID, marks=pytest.mark.long),
        f"{stepping.HYBRID}, accumulated",
    ],
)
def test_training_on_packed_rows_is_the_same_on_every_mesh(layout):
    ours, expected = trained(layout), trained("one device")
    for (state, metrics), (expected_state, expected_metrics) in zip(ours, expected, strict=True):
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-4)
        for leaf, other in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)
    # And it is not what the same rows give without their segments.
    across = trained("one device", with_segments=False)
    assert abs(across[0][1]["loss"] - expected[0][1]["loss"]) > 1e-4


# What it costs, and who may not


@pytest.mark.parametrize("scan_unroll", [1, 2])
def test_segments_take_no_memory_beside_that_of_a_causal_mask(scan_unroll):
    config = dataclasses.replace(MODEL, scan_unroll=scan_unroll)
    model, length = transformer(config), 256
    loss_fn = lm_loss(model)
    names = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    abstract = jax.eval_shape(model.init, jax.random.key(0))[0]

    def loss(params, batch):
        hidden, _ = model.apply(params, {}, batch, key=None, train=True)
        return loss_fn(hidden, batch, params)["loss"][0]

    def memory(names):
        batch = {name: jax.ShapeDtypeStruct((4, length), dtype) for name, dtype in names.items()}
        compiled = jax.jit(jax.grad(loss)).lower(abstract, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = memory(names)
    apart = memory({**names, "segment_ids": jnp.int32, "positions": jnp.int32})
    assert apart - plain < 4 * length * length / 2, "a mask [rows, 1, length, length] is larger"


def test_the_kernel_table_says_who_respects_segments():
    assert set(ATTENTION_IMPLEMENTATIONS) == {"auto", *ATTENTION_KERNELS}
    respecting = {name for name, kernel in ATTENTION_KERNELS.items() if kernel.respects_segments}
    assert respecting == {"xla"}
    h100 = dataclasses.make_dataclass("Device", ["platform", "compute_capability"])("gpu", "9.0")
    for masking, name in (("causal", "cudnn"), ("segments", "xla")):
        choice = asked_attention("auto", h100, "bfloat16", 64, masking=masking)
        assert choice.implementation == name
    assert "cannot keep packed segments apart" in choice.reason
    assert asked_attention("cudnn", h100, "bfloat16", 64).reason == "asked for"
    with pytest.raises(ConfigError, match=r"use auto or xla, or .* cross_document_attention"):
        asked_attention("cudnn", h100, "bfloat16", 64, masking="segments")
    assert attention_cost("cudnn", 4, 8, 1024) == "no scores in memory"
    cost = attention_cost("xla", 4, 8, 1024, masking="segments")
    assert re.match(r"scores of 128 MiB per layer and device \(4 x 8 x 1024 x 1024\); segm", cost)


def fit_packed(model, caplog, loss_fn=None, **options):
    config = jaxtrain.RunConfig(num_steps=1, global_batch_size=8, mesh="fsdp:8")
    with caplog.at_level("INFO"), experimenting.light_compilation():
        data, _ = packed(MODEL, policy="split", **options)
        return jaxtrain.fit(model, loss_fn or lm_loss(model), data, config=config)


def test_a_run_says_which_attention_it_uses(caplog):
    fit_packed(transformer(MODEL), caplog)
    assert "20 documents packed by split into 10 rows of 16 tokens" in caplog.text
    assert "a token attends to its own document" in caplog.text
    attention = next(line for line in caplog.messages if line.startswith("attention: "))
    assert attention.startswith("attention: xla (cuDNN needs an NVIDIA GPU")
    assert "(1 x 4 x 16 x 16); segments kept apart" in attention
    caplog.clear()
    fit_packed(transformer(MODEL), caplog, cross_document_attention=True)
    assert "a token attends to the whole row" in caplog.text
    attention = next(line for line in caplog.messages if line.startswith("attention: "))
    assert "segments" not in attention


def test_a_kernel_that_would_ignore_segments_is_refused_before_anything_is_compiled(caplog):
    with pytest.raises(ConfigError, match="attention='cudnn' cannot keep the documents of packed"):
        fit_packed(transformer(MODEL, attention="cudnn"), caplog)
    assert "compiled in" not in caplog.text


def test_a_model_of_ones_own_that_ignores_segments_is_refused(caplog):
    table = {"table": jnp.ones((64, 8))}

    def apply(params, model_state, batch, *, key, train):
        shown = batch["segment_ids"] if reads else jnp.ones_like(batch["tokens"])
        return params["table"][batch["tokens"]] * shown[..., None], model_state

    def loss_fn(outputs, batch, params):
        mask = batch["loss_mask"]
        return {"loss": (jnp.sum(outputs.sum(-1) * mask), jnp.sum(mask))}

    model = (lambda key: (table, {}), apply)
    reads = False
    with pytest.raises(ConfigError, match=r"the model does not read batch\['segment_ids'\]"):
        fit_packed(model, caplog, loss_fn)
    reads = True
    assert fit_packed(model, caplog, loss_fn).step == 1


def test_segment_ids_have_the_shape_of_tokens():
    model = transformer(MODEL)
    batch = {"tokens": np.zeros((2, 8), np.int32), "segment_ids": np.ones((1, 8), np.int32)}
    with pytest.raises(ConfigError, match=r"shape of tokens, \[2, 8\]; got \[1, 8\]"):
        model.apply(random_params(model), {}, batch, key=None, train=False)
