"""A plan as text for the terminal."""

from jaxtrain import units
from jaxtrain.mesh import format_sizes
from jaxtrain.plan.result import Plan
from jaxtrain.units import nbytes

_SECONDS_PER_DAY = 86_400
_NUM_BUFFERS = 8


def as_text(plan: Plan) -> str:
    """The whole plan of one mesh, some 30 lines."""
    lines = []
    if plan.fused_attention is False and plan.figures["platform"] != "cpu":
        lines.append("unfused attention")
    if plan.is_estimate:
        lines.append("an estimate, compiled for simulated CPU devices")
    lines += [
        f"plan for {plan.target}: {plan.description}",
        f"mesh {format_sizes(plan.mesh)}; {'fits' if plan.fits else 'DOES NOT FIT'}",
        "",
        *_memory(plan),
        "",
        *_time(plan),
    ]
    if plan.warnings:
        lines += ["", "warnings"]
        lines += [f"  {warned.kind}: {warned.text}" for warned in plan.warnings]
    lines += ["", plan.audit.short(), *_ranking(plan), f"flags: {' '.join(plan.flags)}"]
    return "\n".join(lines)


def _ranking(plan: Plan) -> list[str]:
    if not plan.ranking:
        return []
    lines = [
        "",
        f"ranking of {len(plan.ranking)} compiled steps; {plan.num_considered} were estimated",
    ]
    for place, ranked in enumerate(plan.ranking, start=1):
        peak = nbytes(ranked.peak_bytes_per_device)
        step = units.seconds(ranked.step_seconds)
        lines.append(f"  {place}. {step:>8} {peak:>10}  {ranked.reason}")
    if plan.min_hosts:
        lines.append(
            f"smallest number of hosts of {plan.devices_per_host} devices that it fits:"
            f" {plan.min_hosts}"
        )
    return [*lines, ""]


def _memory(plan: Plan) -> list[str]:
    total = plan.peak_bytes_per_device
    lines = ["memory per device"]
    lines += [
        f"  {name.replace('_', ' '):<28}{nbytes(size):>10}  {size / total:6.1%}"
        for name, size in plan.memory.items()
    ]
    share = total / plan.device_bytes if plan.device_bytes else 0
    has = nbytes(plan.device_bytes)
    lines += [
        f"  {'peak':<28}{nbytes(total):>10}  {share:.0%} of what is available",
        f"  {'available':<28}{has:>10}  {plan.device_text}",
    ]
    if plan.buffers:
        lines += ["", "largest temporaries at the peak"]
    for buffer in plan.buffers[:_NUM_BUFFERS]:
        origin = buffer.source or "-"
        scope = _scope(buffer.op_name)
        lines.append(f"  {nbytes(buffer.num_bytes):>10}  {buffer.shape:<28} {origin}  {scope}")
    uses = ", ".join(f"{name} {nbytes(size)}" for name, size in plan.host_memory.items())
    lines += ["", f"memory per host: {nbytes(plan.host_bytes)} ({uses})"]
    return lines


def _time(plan: Plan) -> list[str]:
    found = plan.prediction
    if found is None or plan.flops_per_device is None:
        return ["time: unknown, the step was not compiled"]
    low, high = units.seconds(found.low_seconds), units.seconds(found.high_seconds)
    lines = [
        f"time per step: {units.seconds(found.step_seconds)} ({low} to {high})",
        f"  work {units.count(plan.flops_per_device)} operations per device;"
        f" matrix units {units.seconds(found.matmul_seconds)},"
        f" memory traffic {units.seconds(found.memory_seconds)}",
    ]
    for axis, time in plan.communication.items():
        lines.append(
            f"  communication over {axis}: {nbytes(time.bytes_sent)} sent in"
            f" {units.seconds(time.seconds)}, {units.seconds(time.exposed_seconds)} of it exposed"
        )
    if found.tokens_per_second_per_device:
        per_device = found.tokens_per_second_per_device
        per_day = per_device * plan.num_devices * _SECONDS_PER_DAY
        share = f", {found.mfu:.1%} of peak" if found.mfu else ""
        lines.append(
            f"  {units.count(per_device)} tokens/s per device{share};"
            f" {units.count(per_day)} tokens per day"
        )
    if plan.fused_attention is not None:
        lines.append(f"  attention is {'fused' if plan.fused_attention else 'not fused'}")
    return lines


def _scope(op_name: str) -> str:
    """The end of a scope, which says most."""
    return op_name if len(op_name) <= 60 else "..." + op_name[-57:]
