"""Counting operations and memory traffic of programs, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from planning import CONDITION, LOOP, computation, module_text, tpu_gather, while_text

from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import PRESETS, TransformerConfig, transformer
from jaxtrain.plan import hlo, work
from jaxtrain.state import abstract_state
from jaxtrain.step import make_train_step


def count(entry, *computations):
    return work.count(hlo.parse(module_text(entry, *computations)))


def arrays(**shapes):
    """Parameters, one a line."""
    lines = [f"%{n} = {s} parameter({i})" for i, (n, s) in enumerate(shapes.items())]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------


def test_a_matrix_product():
    entry = arrays(a="bf16[8,64]{1,0}", b="bf16[64,32]{1,0}") + (
        "ROOT %d = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert count(entry).flops == {"matmul": 2 * 8 * 32 * 64}


def test_a_batched_product_that_contracts_two_dims():
    entry = arrays(a="f32[4,8,16,2]{3,2,1,0}", b="f32[4,16,2,3]{3,2,1,0}") + (
        "ROOT %d = f32[4,8,3]{2,1,0} dot(%a, %b), lhs_batch_dims={0},"
        " lhs_contracting_dims={2,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,2}"
    )
    assert count(entry).flops == {"matmul": 2 * 4 * 8 * 3 * 32}


def test_products_inside_fusions_count_and_loops_multiply():
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(9)}"
    assert count(entry, LOOP, CONDITION).flops == {"matmul": 9 * 2 * 64 * 128 * 128}
    inner = computation(
        "gemm",
        """
        %a = bf16[8,64]{1,0} parameter(0)
        %b = bf16[64,32]{1,0} parameter(1)
        ROOT %d = f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        """,
    )
    entry = arrays(x="bf16[8,64]{1,0}", y="bf16[64,32]{1,0}") + (
        "ROOT %f = f32[8,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm"
    )
    found = count(entry, inner)
    assert found.flops == {"matmul": 2 * 8 * 32 * 64}
    assert found.memory_bytes == 2 * (8 * 64 + 64 * 32) + 4 * 8 * 32


def test_cublas_products():
    entry = arrays(a="bf16[64,8]{1,0}", b="bf16[64,32]{1,0}") + (
        "ROOT %d = (bf16[8,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b),"
        ' custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    assert count(entry).flops == {"matmul": 2 * 8 * 32 * 64}


@pytest.mark.parametrize(
    ("window", "positions"),
    [
        # 10 outputs, 3 taps: at both ends one tap falls on padding.
        ("size=3 pad=1_1", 3 * 10 - 2),
        # Every second input: the first output alone has a tap on padding.
        ("size=3 stride=2 pad=1_0", 3 * 5 - 1),
        # Taps two apart reach two inputs over each end.
        ("size=3 pad=2_2 rhs_dilate=2", 3 * 10 - 4),
    ],
)
def test_convolutions_count_taps_on_the_image(window, positions):
    outputs = 5 if "stride" in window else 10
    entry = arrays(x="f32[2,10,4]{2,1,0}", k="f32[3,4,6]{2,1,0}") + (
        f"ROOT %c = f32[2,{outputs},6]{{2,1,0}} convolution(%x, %k), window={{{window}}},"
        " dim_labels=b0f_0io->b0f"
    )
    assert count(entry).flops == {"convolution": 2 * 2 * 4 * 6 * positions}


def test_a_depthwise_convolution_has_one_input_per_output():
    entry = arrays(x="f32[2,10,4]{2,1,0}", k="f32[3,1,4]{2,1,0}") + (
        "ROOT %c = f32[2,8,4]{2,1,0} convolution(%x, %k), window={size=3}, dim_labels=b0f_0io->b0f,"
        " feature_group_count=4"
    )
    assert count(entry).flops == {"convolution": 2 * 2 * 4 * 3 * 8}


def test_a_cudnn_convolution():
    """y[2,8,6] of x[2,10,4] and k[3,4,6]: the same operations in all three directions."""
    forward = 2 * 2 * 4 * 6 * 3 * 8
    shapes = {"x": "f32[2,10,4]", "k": "f32[3,4,6]", "y": "f32[2,8,6]"}
    for target, operands, result in (
        ("Forward", "xk", "y"), ("BackwardInput", "yk", "x"), ("BackwardFilter", "xy", "k"),
    ):  # fmt: skip
        entry = arrays(**{name: shapes[name] for name in operands}) + (
            f"ROOT %c = ({shapes[result]}, u8[0]{{0}}) custom-call(%{operands[0]}, %{operands[1]}),"
            ' window={size=3}, dim_labels=b0f_0io->b0f, custom_call_target="__cudnn$conv'
            f'{target}"'
        )
        assert count(entry).flops == {"convolution": forward}, target


ATTENTION = (
    "custom-call(%q, %k, %k), custom_call_target=\"__cudnn$fmhaSoftmax{backward}\","
    ' backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape":'
    ' {{"element_type": "BF16", "dimensions": ["2", "8", "512", "256"]}},'
    ' "mask_type": "{mask}"}}}}'
)  # fmt: skip


@pytest.mark.parametrize(
    ("backward", "mask", "products"),
    [("", "NO_MASK", 2), ("", "CAUSAL", 1), ("Backward", "NO_MASK", 5),
     ("Backward", "PADDING_CAUSAL", 2.5)],
)  # fmt: skip
def test_fused_attention(backward, mask, products):
    entry = arrays(q="bf16[2,512,8,64]{3,2,1,0}", k="bf16[2,256,2,64]{3,2,1,0}") + (
        "ROOT %o = (bf16[2,8,512,64]{3,1,2,0}, u8[0]{0}) "
        + ATTENTION.format(backward=backward, mask=mask)
    )
    assert count(entry).flops == {"attention": products * 2 * 2 * 8 * 512 * 256 * 64}


def test_collectives_and_waits_are_no_kernels():
    entry = arrays(a="f32[8]{0}") + (
        "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups={}, dimensions={0}\n"
        "%n = f32[8]{0} negate(%a)\n"
        "ROOT %d = f32[64]{0} all-gather-done(%s)"
    )
    found = count(entry)
    assert (found.num_launches, found.memory_bytes) == (1, 64)


def test_loops_of_unknown_length_are_named():
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(None)}"
    assert count(entry, LOOP, CONDITION).unknown_loops == ("while.1",)


def test_gpt2_on_cpu_within_one_percent_of_a_hand_count():
    """One step of the preset, compiled here: B = 2 rows of T = 256."""
    B, T, L, D, F, V = 2, 256, 12, 768, 3072, 50_304
    config = TransformerConfig(**PRESETS["gpt2"])
    model = transformer(config, attention="xla")
    mesh = make_mesh("data:1", devices=jax.devices()[:1])
    tx = optax.sgd(0.1)
    step = make_train_step(model, lm_loss(model), tx, mesh)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens,
             "loss_mask": jax.ShapeDtypeStruct((B, T), jnp.float32)}  # fmt: skip
    compiled = jax.jit(step).lower(abstract_state(model, tx), batch).compile()
    found = work.count(hlo.parse(compiled.as_text()))
    # A product with a weight: once forward, twice backward. Attention: scores and values forward,
    # the gradients of both operands of both backward; XLA's attention computes the whole square.
    weights = L * (4 * D * D + 2 * D * F) + V * D
    by_hand = 3 * 2 * B * T * weights + L * 6 * 2 * B * T * T * D
    assert found.total_flops == pytest.approx(by_hand, rel=0.01)
    assert found.unknown_loops == ()


# ---------------------------------------------------------------------------------------------
# Memory traffic
# ---------------------------------------------------------------------------------------------


def fused(body, entry_shapes, result):
    operands = ", ".join(f"%{name}" for name in entry_shapes)
    entry = arrays(**entry_shapes) + f"ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%b"
    return count(entry, computation("b", body)).memory_bytes


def test_an_elementwise_fusion_reads_and_writes_everything_once():
    body = """
    %x = f32[100]{0} parameter(0)
    %y = bf16[100]{0} parameter(1)
    %c = f32[100]{0} convert(%y)
    %m = f32[100]{0} multiply(%x, %c)
    ROOT %a = f32[100]{0} add(%m, %x)
    """
    moved = fused(body, {"p": "f32[100]{0}", "q": "bf16[100]{0}"}, "f32[100]{0}")
    assert moved == 400 + 200 + 400


def test_a_layer_is_cut_from_its_stack():
    """Of the 32 stacked layers one is read, also where it is cast before it is cut."""
    body = """
    %x = f32[32,100]{1,0} parameter(0)
    %i = s32[] parameter(1)
    %z = s32[] constant(0)
    %c = bf16[32,100]{1,0} convert(%x)
    ROOT %s = bf16[1,100]{1,0} dynamic-slice(%c, %i, %z), dynamic_slice_sizes={1,100}
    """
    moved = fused(body, {"p": "f32[32,100]{1,0}", "i": "s32[]"}, "bf16[1,100]{1,0}")
    assert moved == 400 + 4 + 200


def test_a_slice_is_written_in_place():
    body = """
    %x = f32[32,100]{1,0} parameter(0)
    %u = f32[1,100]{1,0} parameter(1)
    %i = s32[] parameter(2)
    %z = s32[] constant(0)
    ROOT %s = f32[32,100]{1,0} dynamic-update-slice(%x, %u, %i, %z)
    """
    shapes = {"p": "f32[32,100]{1,0}", "u": "f32[1,100]{1,0}", "i": "s32[]"}
    assert fused(body, shapes, "f32[32,100]{1,0}") == 400 + 400 + 4


def test_an_array_that_is_cut_and_also_used_whole_is_read_whole():
    body = """
    %x = f32[32,100]{1,0} parameter(0)
    %i = s32[] parameter(1)
    %z = s32[] constant(0)
    %s = f32[1,100]{1,0} dynamic-slice(%x, %i, %z), dynamic_slice_sizes={1,100}
    %n = f32[32,100]{1,0} negate(%x)
    %e = f32[32,100]{1,0} exponential(%x)
    ROOT %t = (f32[1,100]{1,0}, f32[32,100]{1,0}) tuple(%s, %e)
    """
    shapes = {"p": "f32[32,100]{1,0}", "i": "s32[]"}
    moved = fused(body, shapes, "(f32[1,100]{1,0}, f32[32,100]{1,0})")
    assert moved == 12_800 + 4 + 400 + 12_800


def test_what_a_tpu_gathers_is_no_traffic_of_the_fusion_that_hands_it_on():
    found = count(*tpu_gather())
    assert (found.num_launches, found.memory_bytes) == (1, 8000)


@pytest.mark.parametrize(
    ("instruction", "moved"),
    [
        ("ROOT %r = f32[32,100]{1,0} copy(%a)", 2 * 12_800),
        ("ROOT %r = f32[32,100]{1,0} dynamic-update-slice(%a, %b, %i, %i)", 2 * 400),
        ("ROOT %r = f32[1,100]{1,0} dynamic-slice(%a, %i, %i)", 2 * 400),
        ("ROOT %r = f32[5,100]{1,0} gather(%a, %j), offset_dims={1}", 2 * 2000 + 20),
        ("ROOT %r = f32[3200]{0} bitcast(%a)", 0),
        ("ROOT %r = (f32[32,100]{1,0}, s32[]) tuple(%a, %i)", 0),
    ],
)
def test_single_instructions(instruction, moved):
    shapes = {"a": "f32[32,100]{1,0}", "b": "f32[1,100]{1,0}", "i": "s32[]", "j": "s32[5,1]{1,0}"}
    assert count(arrays(**shapes) + instruction).memory_bytes == moved
