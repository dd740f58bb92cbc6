"""Measures what `import jaxtrain` costs beside what it is built on.

    .venv/bin/python scripts/bench_import.py

Alternating interpreters import jax, optax and flax.nnx, or jaxtrain with `jaxtrain.fit`, which
brings these along. Prints one line of JSON: medians in seconds of wall time and of processor time
(which other programs on the machine disturb less), and the median of the differences within a
round. About half a minute.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 9
STATEMENTS = {
    "bare": "import jax, optax, flax.nnx",
    "jaxtrain": "import jaxtrain",
    "fit": "import jaxtrain; jaxtrain.fit; import jax, optax, flax.nnx",
}


def measure(statement: str, environment: dict[str, str]) -> tuple[float, float]:
    """(wall time, processor time) of an interpreter that runs a statement."""
    begin, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", statement], env=environment, check=True)
    wall, after = time.perf_counter() - begin, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


def main() -> None:
    with tempfile.TemporaryDirectory() as bytecode:
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
            # Compiling jax anew in every interpreter would hide everything else.
            environment["PYTHONPYCACHEPREFIX"] = bytecode
        rounds = []
        for number in range(ROUNDS + 1):
            times = {name: measure(code, environment) for name, code in STATEMENTS.items()}
            if number:  # the first round writes bytecode
                rounds.append(times)
    result: dict[str, float | int] = {"rounds": ROUNDS}
    for index, kind in enumerate(("seconds", "cpu_seconds")):
        for name in STATEMENTS:
            result[f"{name}_{kind}"] = statistics.median(r[name][index] for r in rounds)
        extra = [r["fit"][index] - r["bare"][index] for r in rounds]
        result[f"extra_{kind}"] = statistics.median(extra)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
