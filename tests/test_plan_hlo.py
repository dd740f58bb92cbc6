"""Parsing the text of optimised programs."""

import jax
import jax.numpy as jnp
import pytest
from planning import CONDITION, LOOP, computation, module_text, while_text

from jaxtrain.plan import hlo

TABLES = """FileNames
1 "/model/layers.py"
2 "/model/attention.py"

FunctionNames
1 "apply"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=2 function_name_id=1 line=93 end_line=94 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""


def only(text, **kwargs):
    """The one instruction of an entry, and its module."""
    module = hlo.parse(module_text(text, **kwargs))
    (instruction,) = module.entry.instructions.values()
    return module, instruction


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bf16", 16), ("f32", 32), ("pred", 8), ("s4", 4), ("f8e4m3fn", 8), ("c64", 64), ("u8", 8),
     ("token", 0)],
)  # fmt: skip
def test_dtypes_have_sizes(dtype, bits):
    assert hlo.item_bits(dtype) == bits


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="unknown HLO dtype 'weird'"):
        hlo.item_bits("weird")


@pytest.mark.parametrize(
    ("shape", "arrays"),
    [
        ("f32[]", [("f32", ())]),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (2, 3))]),
        ("(s32[], (f32[4]{0}, pred[2,2]{1,0}))", [("s32", ()), ("f32", (4,)), ("pred", (2, 2))]),
        ("f32[<=8,3]{1,0}", [("f32", (8, 3))]),
        ("(f32[1]{0}, f32[2]{0}, /*index=2*/f32[3]{0})",
         [("f32", (1,)), ("f32", (2,)), ("f32", (3,))]),
    ],
)  # fmt: skip
def test_shapes_become_arrays(shape, arrays):
    assert list(hlo.parse_arrays(shape)) == arrays


def test_bytes_are_those_of_the_elements():
    assert hlo.Array("bf16", (3, 5)).num_bytes == 30
    assert hlo.Array("s4", (8,)).num_bytes == 4


def test_an_instruction_has_operands_attributes_and_a_source():
    line = (
        "ROOT %fusion.7 = (bf16[8,4]{1,0}, f32[4]{0}) fusion(%a.1, /*index=1*/%b), kind=kLoop,"
        ' calls=%inside, frontend_attributes={x="a, b"}, metadata={op_name="jit(step)/mul, (q)"'
        ' stack_frame_id=2}, backend_config={"k":["1","2"],"s":"a\\"b"}'
    )
    _, instruction = only(line, tables=TABLES)
    assert (instruction.name, instruction.opcode, instruction.is_root) == (
        "fusion.7", "fusion", True,
    )  # fmt: skip
    assert instruction.arrays == (("bf16", (8, 4)), ("f32", (4,)))
    assert instruction.operands == ("a.1", "b")
    assert instruction.called == ("inside",)
    assert instruction.attributes["kind"] == "kLoop"
    assert instruction.attributes["backend_config"] == '{"k":["1","2"],"s":"a\\"b"}'
    assert list(instruction.attributes) == [
        "kind", "calls", "frontend_attributes", "metadata", "backend_config",
    ]  # fmt: skip
    assert instruction.op_name == "jit(step)/mul, (q)"
    module, instruction = only(line, tables=TABLES)
    assert module.source(instruction) == "/model/attention.py:93"


def test_a_source_may_stand_in_the_instruction_itself():
    module, instruction = only(
        '%add = f32[] add(%a, %b), metadata={op_name="x" source_file="m.py" source_line=5}'
    )
    assert module.source(instruction) == "m.py:5"


def test_constants_have_no_operands():
    _, instruction = only("%c = f32[2,2]{1,0} constant({ {1, 2}, {3, 4} })")
    assert instruction.operands == ()


def test_operands_may_carry_their_shapes():
    _, instruction = only("%add = f32[2]{0} add(f32[2]{0:T(128)} %a, (f32[2]{0}, s32[]) %b)")
    assert instruction.operands == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [("stablehlo.module {", "not an HLO module"), ("HloModule a\n\n%b () -> f32[] {\n}", "ENTRY")],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        hlo.parse(text)


def test_parameters_are_ordered_by_number():
    text = computation("c", "%b = f32[] parameter(1)\nROOT %a = f32[2]{0} parameter(0)")
    module = hlo.parse(module_text("ROOT %c = f32[] constant(0)", text))
    assert [p.name for p in module.computations["c"].parameters] == ["a", "b"]


def test_loops_multiply():
    outer = LOOP.replace("%body ", "%outer ").replace(
        "%dot.1 =", f"{while_text(3, name='inner').replace('%init', '%arg')}\n  %dot.1 ="
    )
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(5, body='outer')}"
    module = hlo.parse(module_text(entry, LOOP, outer, CONDITION))
    times = [(s.times, len(s.loops)) for s in module.walk() if s.instruction.opcode == "dot"]
    assert sorted(times) == [(5, 1), (15, 2)]


def test_a_loop_of_unknown_length_runs_once():
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(None)}"
    module = hlo.parse(module_text(entry, LOOP, CONDITION))
    (loop,) = (s for s in module.walk() if s.instruction.opcode == "while")
    assert module.turns(loop.computation, loop.instruction) is None
    assert [s.times for s in module.walk() if s.instruction.opcode == "dot"] == [1]


@pytest.mark.parametrize(
    ("start", "step", "direction", "turns"),
    [(0, 1, "LT", 10), (1, 1, "LT", 9), (0, 3, "LT", 4), (2, 2, "LE", 5), (12, 1, "LT", 0),
     (0, 1, "GT", None), (0, 0, "LT", None)],
)  # fmt: skip
def test_turns_are_worked_out_from_the_counter(start, step, direction, turns):
    """What XLA leaves of a pipelined loop: a condition in a fusion, a start behind a copy."""
    compare = computation(
        "compare",
        f"""
        %a = s32[] parameter(0)
        %n = s32[] constant(10)
        ROOT %c = pred[] compare(%a, %n), direction={direction}
        """,
    )
    condition = computation(
        "condition",
        """
        %state = (f32[4]{0}, s32[]) parameter(0)
        %i = s32[] get-tuple-element(%state), index=1
        ROOT %f = pred[] fusion(%i), kind=kLoop, calls=%compare
        """,
    )
    body = computation(
        "body",
        f"""
        %state = (f32[4]{{0}}, s32[]) parameter(0)
        %x = f32[4]{{0}} get-tuple-element(%state), index=0
        %i = s32[] get-tuple-element(%state), index=1
        %one = s32[] constant({step})
        %next = s32[] add(%i, %one)
        ROOT %t = (f32[4]{{0}}, s32[]) tuple(%x, %next)
        """,
    )
    entry = f"""
    %x = f32[4]{{0}} parameter(0)
    %start = s32[] constant({start})
    %copy = s32[] copy(%start)
    %init = (f32[4]{{0}}, s32[]) tuple(%x, %copy)
    ROOT %loop = (f32[4]{{0}}, s32[]) while(%init), condition=%condition, body=%body
    """
    module = hlo.parse(module_text(entry, compare, condition, body))
    assert module.turns(module.entry, module.entry.root) == turns


def test_of_a_conditional_the_longest_branch_runs():
    short = computation("short", "ROOT %s = f32[] parameter(0)")
    long = computation("long", "%l = f32[] parameter(0)\nROOT %n = f32[] negate(%l)")
    entry = """
    %p = pred[] parameter(0)
    %a = f32[] parameter(1)
    ROOT %if = f32[] conditional(%p, %a, %a), branch_computations={%short, %long}
    """
    module = hlo.parse(module_text(entry, short, long))
    assert "n" in [site.instruction.name for site in module.walk()]
    assert "s" not in [site.instruction.name for site in module.walk()]


def test_a_compiled_program_is_understood_whole():
    def step(w, x_LD):
        def layer(x_D, _):
            return jnp.tanh(w @ x_D), None

        return jax.lax.scan(layer, x_LD[0], None, length=7)[0]

    compiled = jax.jit(step).lower(jnp.zeros((32, 32)), jnp.zeros((2, 32))).compile()
    module = hlo.parse(compiled.as_text())
    assert module.name == "jit_step"
    (loop,) = (s for s in module.walk() if s.instruction.opcode == "while")
    assert module.turns(loop.computation, loop.instruction) == 7
    for inside in module.computations.values():
        for instruction in inside.instructions.values():
            assert set(instruction.operands) <= set(inside.instructions)
            assert len(module.called(instruction)) == len(instruction.called)
    assert any(module.source(s.instruction).startswith(__file__) for s in module.walk())
