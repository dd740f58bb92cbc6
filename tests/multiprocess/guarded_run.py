"""A process under a guardian that does, in Python, what it is told on standard input; no JAX.

It says "ready PID" when it is there, and "done" after each line. Without standard input it sleeps
for GUARDED_SECONDS.
"""

import os
import signal
import sys
import time

from jaxtrain import flags, phases
from jaxtrain.config import RunConfig
from jaxtrain.launch.guarding import become_guardian
from jaxtrain.phases import Phase, report, report_exit

__all__ = ["Phase", "os", "report", "report_exit", "signal", "time"]


def main() -> None:
    config = flags.parse(sys.argv, RunConfig)
    become_guardian(config)
    print(f"ready {os.getpid()} {phases.is_guarded()}", flush=True)
    for line in sys.stdin:
        exec(line, globals())
        print("done", flush=True)
    time.sleep(float(os.environ.get("GUARDED_SECONDS", "0")))


if __name__ == "__main__":
    main()
