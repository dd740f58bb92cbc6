"""Why a compiled step stands where it does among others, in words."""

from jaxtrain.mesh import factor_over_nodes, format_sizes
from jaxtrain.plan.advice import Warned
from jaxtrain.plan.result import Plan
from jaxtrain.units import nbytes, seconds


def reason(plan: Plan, best: Plan) -> str:
    """Why a plan stands where it does in the ranking."""
    name = _name(plan, best)
    if not plan.fits:
        largest = max(plan.memory, key=lambda key: plan.memory[key]).replace("_", " ")
        return (
            f"{name} does not fit: {nbytes(plan.peak_bytes_per_device)} of"
            f" {nbytes(plan.device_bytes)}, most of it {largest}"
        )
    mine, other = plan.prediction, best.prediction
    if mine is None or other is None:
        return f"{name} fits"
    if plan is best:
        return (
            f"{name} is the fastest: {seconds(mine.step_seconds)} a step,"
            f" {seconds(mine.exposed_seconds)} of it waiting for communication"
        )
    ratio = mine.step_seconds / other.step_seconds
    speed = "as fast" if ratio < 1.005 else f"{ratio:.2f}x slower"
    return f"{name} is {speed}: {_cause(plan, best)}"


def _name(plan: Plan, best: Plan) -> str:
    """The mesh of a plan, and what else tells it apart from the best one."""
    steps, remat = (flag.partition("=")[2] for flag in plan.choice[1:])
    differs = [mine != other for mine, other in zip(plan.choice, best.choice, strict=True)]
    parts = f"{steps} micro-batch{'es' * (steps != '1')}"
    more = [parts] * differs[1] + [f"remat {remat}"] * differs[2]
    return format_sizes(plan.mesh) + (f" with {' and '.join(more)}" if more else "")


def _cause(plan: Plan, best: Plan) -> str:
    """What takes more time than in the best plan, the most expensive thing."""
    mine, other = plan.prediction, best.prediction
    if mine is None or other is None:
        return ""
    more: dict[str, float] = {"": mine.kernel_seconds - other.kernel_seconds}
    for axis, spent in plan.communication.items():
        before = best.communication.get(axis)
        more[axis] = spent.exposed_seconds - (before.exposed_seconds if before else 0.0)
    axis = max(more, key=lambda key: more[key])
    if axis:
        spent = plan.communication[axis]
        return (
            f"its {_what(axis)} {_where(plan, axis)}, {seconds(spent.seconds)}, do not hide behind"
            f" {seconds(mine.kernel_seconds)} of compute: {seconds(spent.exposed_seconds)} are"
            f" waited for"
        )
    again, before = (p.phases.get("remat", (0.0, 0.0))[0] for p in (mine, other))
    if again - before > 0.5 * more[""]:
        return (
            f"it computes {seconds(again)} of the forward pass again, the fastest {seconds(before)}"
        )
    return (
        f"its kernels take {seconds(mine.kernel_seconds)}, those of the fastest"
        f" {seconds(other.kernel_seconds)}: matrix units {seconds(mine.matmul_seconds)} against"
        f" {seconds(other.matmul_seconds)}, memory traffic {seconds(mine.memory_seconds)} against"
        f" {seconds(other.memory_seconds)}"
    )


def _what(axis: str) -> str:
    known = {
        "fsdp": "gathers of parameters and scatters of gradients",
        "data": "sums of gradients over data",
        "tensor": "sums of activations over tensor",
    }
    return known.get(axis, f"collectives over {axis}")


def _where(plan: Plan, axis: str) -> str:
    factors = factor_over_nodes(plan.mesh, plan.devices_per_host)
    across = any(factors[name][0] > 1 for name in axis.split("+") if name in factors)
    return "between nodes" if across else "inside a node"


def refusal(best: Plan, hosts: int | None, confirmed: Plan | None) -> tuple[Warned, ...]:
    """The warnings of a target that nothing fits on.

    Args:
        best: what comes nearest.
        hosts: how many would be enough, if that is known.
        confirmed: the compiled step that fits them.
    """
    text = (
        f"no mesh fits: the smallest step needs {nbytes(best.peak_bytes_per_device)} per device,"
        f" and {nbytes(best.device_bytes)} are there ({best.device_text})"
    )
    if hosts is None or confirmed is None:
        text += (
            "; no larger number of hosts was found that does: use a larger batch, so that more"
            " devices can share it, or shorter rows"
        )
    else:
        flags = " ".join(confirmed.choice)
        text += (
            f"; it needs at least {hosts} hosts of {best.devices_per_host} such devices"
            f" (--plan={confirmed.target} {flags})"
        )
    rest = [warned for warned in best.warnings if warned.kind != "does_not_fit"]
    return (Warned("does_not_fit", text), *rest)
