"""Finds what is wasteful in a compiled step: the warnings of a plan.

Each rule looks at the program, not at the configuration, so it also finds what XLA made of a good
layout. Shares are of the predicted step; a rule stays silent below `_SHARE`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.plan import work
from jaxtrain.plan.cost import Prediction
from jaxtrain.plan.hlo import Module, Site
from jaxtrain.plan.origin import short_source
from jaxtrain.plan.traffic import Collective
from jaxtrain.units import nbytes, seconds

_SHARE = 0.02
"""Less than this share of the step is not worth a warning."""
_SMALL_BYTES = 256 * 1024
"""Below this, latency and not bandwidth decides how long a collective takes."""
_MANY = 200
"""Small collectives in a step, of tens of microseconds each."""
_SHORT_KERNEL_SECONDS = 5e-6
"""About what it takes to launch a kernel."""
_UNIT = 8
"""Matrix units take 16-bit numbers by at least eights in each dim."""


class Warned(NamedTuple):
    """One finding; `kind` is stable, `text` is for people."""

    kind: str
    text: str


def warnings(
    module: Module, collectives: Sequence[Collective], prediction: Prediction
) -> list[Warned]:
    """All findings that the program itself shows, the most expensive kinds first.

    Args:
        module: the compiled step.
        collectives: its own, from `traffic.communication`.
        prediction: its own, from `cost.predict`.
    """
    done = work.count(module)
    return [
        *_unfused_attention(module),
        *_collectives_in_loops(collectives),
        *_exposed(collectives, prediction),
        *_float32_gathers(module, collectives),
        *_small(collectives),
        *_slow_links(collectives),
        *_padding(module),
        *_little_work(done, prediction),
        *_unknown_loops(done),
    ]


def attention_is_fused(module: Module) -> bool | None:
    """Whether attention runs in fused kernels throughout; None for a program without any.

    Told by kernels that say so, and by matrix products inside a scope named `attend`.
    """
    found = None
    for site in module.walk():
        for flops in _flops(module, site):
            if flops.kind == "attention":
                found = True if found is None else found
            elif "/attend/" in site.instruction.op_name:
                return False
    return found


def involuntary_remat(log: Sequence[str]) -> list[Warned]:
    """Turns what XLA's partitioner complained of into warnings."""
    return [
        Warned(
            "involuntary_remat",
            f"XLA replicates an array on every device, because it knows no other way from one"
            f" layout to the next: {line}",
        )
        for line in log
    ]


def _flops(module: Module, site: Site) -> tuple[work.Flops, ...]:
    kernel = work.kernel_of(module, site.computation, site.instruction)
    return kernel.flops if kernel is not None else ()


def _unfused_attention(module: Module) -> Iterator[Warned]:
    if attention_is_fused(module) is not False:
        return
    yield Warned(
        "unfused_attention",
        "unfused attention: its scores go through memory; their size grows with the square of"
        " the length",
    )


def _collectives_in_loops(collectives: Sequence[Collective]) -> Iterator[Warned]:
    """Sums over micro-batches, or over chunks of the loss, that could be taken once at the end."""
    for c in collectives:
        axes = c.axis.split("+")
        is_reduction = c.kind in ("all-reduce", "reduce-scatter")
        sums_micro_batches = "accumulate" in c.loops and is_reduction and "data" in axes
        is_chunk = "loss" in c.loops and {"data", "fsdp"} & {*axes}
        if (sums_micro_batches or is_chunk) and c.times > 1:
            loop = "loss" if is_chunk else "accumulate"
            yield Warned(
                "collective_in_loop",
                f"{_say(c)} runs {c.times:,} times, inside the loop {loop!r}; once behind the"
                f" loop would do",
            )


def _exposed(collectives: Sequence[Collective], prediction: Prediction) -> Iterator[Warned]:
    for axis, time in prediction.communication.items():
        if time.exposed_seconds < _SHARE * prediction.step_seconds:
            continue
        of_axis = [c for c in collectives if c.axis == axis]
        worst = max(of_axis, key=lambda c: prediction.exposed_by.get(c.name, 0.0))
        yield Warned(
            "not_overlapped",
            f"{seconds(time.exposed_seconds)} of"
            f" {seconds(time.seconds)} of communication over {axis!r} hide behind no"
            f" computation; most of it {_say(worst)}, {worst.times:,} times",
        )


def _float32_gathers(module: Module, collectives: Sequence[Collective]) -> Iterator[Warned]:
    """Parameters that move in float32 in a program that multiplies in 16 bits."""
    products = {f.dtype for site in module.walk() for f in _flops(module, site)}
    if not products & {"bf16", "f16"}:
        return
    wide = [c for c in collectives if c.kind == "all-gather" and c.dtypes == ("f32",)]
    sent = sum(c.total_bytes_sent for c in wide)
    total = sum(c.total_bytes_sent for c in collectives)
    if not wide or sent < _SHARE * total:
        return
    worst = max(wide, key=lambda c: c.total_bytes_sent)
    yield Warned(
        "float32_gather",
        f"{nbytes(sent)} are gathered in float32 though the program computes in 16 bits;"
        f" most of it {_say(worst)}",
    )


def _small(collectives: Sequence[Collective]) -> Iterator[Warned]:
    small = [c for c in collectives if c.num_bytes < _SMALL_BYTES and c.group_size > 1]
    times = sum(c.times for c in small)
    if times < _MANY:
        return
    worst = max(small, key=lambda c: c.times)
    yield Warned(
        "many_small_collectives",
        f"{times:,} collectives of less than {nbytes(_SMALL_BYTES)} run in a step; most"
        f" often {_say(worst)}, {worst.times:,} times",
    )


def _slow_links(collectives: Sequence[Collective]) -> Iterator[Warned]:
    """Sums of activations, which every layer waits for, that cross hosts."""
    large = [c for c in collectives if c.num_bytes >= _SMALL_BYTES]
    if any(c.axis == "tensor" and c.spans_hosts for c in large):
        yield Warned(
            "slow_link",
            "the axis 'tensor' spans hosts, and every layer waits for it; make it at most as large"
            " as a host",
        )


def _padding(module: Module) -> Iterator[Warned]:
    """Matrix products whose sizes the matrix units have to pad."""
    odd, total, worst = 0.0, 0.0, (0.0, "")
    for site in module.walk():
        done = site.times * sum(f.count for f in _flops(module, site) if f.kind == "matmul")
        total += done
        dims = site.instruction.arrays[0].dims[-2:] if done else ()
        if any(dim % _UNIT for dim in dims):
            odd += done
            shape = "x".join(str(dim) for dim in dims)
            worst = max(
                worst, (done, f"{shape} at {short_source(module.source(site.instruction))}")
            )
    if not total or odd < _SHARE * total:
        return
    yield Warned(
        "padding_waste",
        f"{odd / total:.0%} of the matrix products have sizes that are no multiple of {_UNIT},"
        f" which the matrix units pad; most of it {worst[1]}",
    )


def _little_work(done: work.Work, prediction: Prediction) -> Iterator[Warned]:
    launches = done.num_launches
    if not launches or prediction.kernel_seconds / launches > _SHORT_KERNEL_SECONDS:
        return
    mean = prediction.kernel_seconds / launches
    yield Warned(
        "little_work",
        f"a step is {launches:,} kernels of {1e6 * mean:.1f} us on average, about what it"
        f" takes to launch one; give each device more rows, or use fewer devices",
    )


def _unknown_loops(done: work.Work) -> Iterator[Warned]:
    names = done.unknown_loops
    if not names:
        return
    yield Warned(
        "unknown_loop",
        f"the compiler does not know how often {len(names)} loops turn ({', '.join(names)});"
        f" they are counted once, so the step takes longer than predicted",
    )


def _say(c: Collective) -> str:
    where = f" at {short_source(c.source)}" if c.source else ""
    dtype = " and ".join(c.dtypes)
    article = "an" if c.kind.startswith("a") else "a"
    return f"{article} {c.kind} of {nbytes(c.num_bytes)} {dtype} over {c.axis!r}{where}"
