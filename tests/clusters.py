"""Runs of several real processes on this machine, each with simulated devices of its own."""

import contextlib
import json
import socket
from pathlib import Path

import numpy as np
from processes import Run

LM, JOIN, TOY = "multiprocess/lm_run.py", "multiprocess/join_run.py", "faults/toy_run.py"
PYTHON = {"PYTHONWARNINGS": "error"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def flags_of(num_processes, host="127.0.0.1"):
    """For each process the flags that tell it its place."""
    coordinator = f"{host}:{free_port()}"
    return [
        [
            f"--coordinator={coordinator}",
            f"--num_processes={num_processes}",
            f"--process_id={process_id}",
        ]
        for process_id in range(num_processes)
    ]


@contextlib.contextmanager
def started(workdir, *flags, num_processes, places=None, variables=None, script=LM):
    """The runs of a cluster; they are killed at the end of the block if they are still there.

    Args:
        workdir: of all.
        *flags: of all.
        num_processes: how many.
        places: for each the flags that only it gets; None: those that tell it its place.
        variables: for each the variables of the environment that only it gets.
        script: what they run.
    """
    places = flags_of(num_processes) if places is None else places
    variables = [{}] * num_processes if variables is None else variables
    with contextlib.ExitStack() as stack:
        runs = []
        for mine, environ in zip(places, variables, strict=True):
            run = Run(workdir, *flags, *mine, script=script, variables={**PYTHON, **environ})
            stack.callback(run.close)
            runs.append(run)
        yield runs


def finished(workdir, *flags, num_processes, **options):
    """(exit codes, outputs) of a cluster that ends by itself."""
    with started(workdir, *flags, num_processes=num_processes, **options) as runs:
        return [run.end() for run in runs], [run.output for run in runs]


def said(output):
    """The JSON that a process printed last."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")][-1:]
    return json.loads(line)


def samples(workdir):
    """{first position of a batch: sample ids of the batch}, over all processes and restarts."""
    batches = {}
    for path in sorted(Path(workdir).glob("samples-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            batch = batches.setdefault(record["position"], {})
            for row, sample in zip(record["rows"], record["samples"], strict=True):
                assert batch.setdefault(row, sample) == sample
    return {
        position: np.array([batch[row] for row in range(len(batch))])
        for position, batch in sorted(batches.items())
    }


def note_samples(workdir):
    """Lets this process note the samples of every training batch that it makes."""
    import jax

    from jaxtrain.data import load

    rows_of = load._Order.rows
    path = Path(workdir, f"samples-{jax.process_index()}.jsonl")

    def noting(self, number):
        rows = rows_of(self, number)
        record = {
            "position": self.position(number),
            "rows": self._rows_R.tolist(),
            "samples": rows.indices.tolist(),
        }
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        return rows

    load._Order.rows = noting
