"""`jaxtrain doctor` as one of several processes; with TOY_AT=odd on a host unlike the others."""

import os
import sys
import time
import types

from jaxtrain import cli, doctor_facts
from jaxtrain.launch import clocks

if __name__ == "__main__":
    if os.environ["TOY_AT"] == "odd":
        found = doctor_facts.versions()
        doctor_facts.versions = lambda: {**found, "jax": "0.9.1"}
        doctor_facts.memory_bytes = lambda: 2**33
        clocks.time = types.SimpleNamespace(time=lambda: time.time() + 90, monotonic=time.monotonic)
    cli.main(["jaxtrain", "doctor", *sys.argv[1:]])
