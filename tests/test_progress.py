"""The display on a real pseudo-terminal, the lines without one, and the rules behind them."""

import fcntl
import logging
import os
import re
import struct
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest

from jaxtrain import progress, units
from jaxtrain.progress import Progress
from jaxtrain.throughput import (
    limiting,
    peak_flops,
    training_flops_per_token,
    transfer_share,
)

RECORD = {
    "step": 10,
    "loss": 2.41349,
    "grad_norm": 1.2,
    "learning_rate": 3e-4,
    "accuracy": 0.45,
    "tokens": 20480,
    "samples": 320,
    "samples_per_second": 194.0,
    "tokens_per_second": 12_400.0,
    "step_seconds": 0.0415,
    "input_wait_seconds": 0.0001,
    "h2d_seconds": 0.001,
    "mfu": None,
}


# What limits the step ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ({"step_seconds": 1.0}, "compute"),
        ({}, "compute"),
        ({"step_seconds": None, "input_wait_seconds": None}, "compute"),
        ({"step_seconds": 1.0, "input_wait_seconds": 0.09, "h2d_seconds": 0.9}, "compute"),
        ({"step_seconds": 1.0, "input_wait_seconds": 0.1, "h2d_seconds": 0.2}, "input"),
        ({"step_seconds": 1.0, "input_wait_seconds": 0.1, "h2d_seconds": 0.8}, "transfer"),
        (
            {"step_seconds": 1.0, "input_wait_seconds": 0.5, "h2d_seconds": 0.3}
            | {"read_seconds": 0.1},
            "transfer",
        ),
        ({"step_seconds": 1.0, "host_seconds": 0.49}, "compute"),
        ({"step_seconds": 1.0, "host_seconds": 0.5, "input_wait_seconds": 0.2}, "logging/host"),
        ({"step_seconds": 2.0, "host_seconds": 1.0, "input_wait_seconds": 1.0}, "logging/host"),
    ],
)
def test_limiting_follows_its_rule(times, limit):
    assert limiting(times) == limit


def test_transfer_share():
    assert transfer_share({}) == 0
    assert transfer_share({"step_seconds": 4.0, "h2d_seconds": 1.0}) == 0.25
    assert transfer_share({"step_seconds": 4.0, "h2d_seconds": 1.0, "read_seconds": 1.0}) == 0.5
    assert transfer_share({"step_seconds": 1.0, "h2d_seconds": 3.0}) == 1.0


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H100 NVL", 835.5e12, 417.5e12),
        ("NVIDIA H200", 989.4e12, 494.7e12),
        ("NVIDIA H200 NVL", 835.5e12, 417.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA B200", 2250e12, 1100e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("TPU v5e", 197e12, 197e12),
        ("TPU v5", 459e12, 459e12),
        ("TPU v5p", 459e12, 459e12),
        ("TPU v6 lite", 918e12, 918e12),
        ("cpu", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_peaks(kind, bfloat16, float32):
    assert peak_flops(kind, "bfloat16") == bfloat16
    assert peak_flops(kind, "float32") == float32
    assert peak_flops(kind, "int8") is None


def test_utilisation_agrees_with_a_published_one():
    # MaxText, Llama 3.1 8B at 8,192 on 256 TPU v6e: 7,207 tokens/s per chip, 45.5 % of peak.
    lookup_table = 128_256 * 4_096
    flops = training_flops_per_token(
        8_030_261_248 - lookup_table, num_layers=32, attention_dim=4_096, sequence_length=8_192
    )
    peak = peak_flops("TPU v6 lite", "bfloat16")
    assert peak is not None
    assert 7_207 * flops / peak == pytest.approx(0.455, abs=0.001)


# Texts of numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.number, 2.41349, "2.413"),
        (units.number, 12.3, "12.30"),
        (units.number, -0.03125, "-0.03125"),
        (units.number, 1234.5, "1234"),
        (units.number, 9.8e-5, "9.80e-05"),
        (units.number, 0.0, "0"),
        (units.number, float("nan"), "nan"),
        (units.number, None, "-"),
        (units.count, 0, "0"),
        (units.count, 950, "950"),
        (units.count, 12_345, "12.3k"),
        (units.count, 999_999, "1.00M"),
        (units.count, 8_030_261_248, "8.03B"),
        (units.count, 2.5, "2.5"),
        (units.count, float("inf"), "inf"),
        (units.nbytes, 512, "512 B"),
        (units.nbytes, 1536, "1.50 KiB"),
        (units.nbytes, 16 * 1024**3, "16.0 GiB"),
        (units.seconds, 0.00042, "420 us"),
        (units.seconds, 0.0415, "41.5 ms"),
        (units.seconds, 0.9999, "1.00 s"),
        (units.seconds, 3.214, "3.21 s"),
        (units.seconds, 750, "12:30"),
        (units.clock, 7, "0:07"),
        (units.clock, 59.6, "1:00"),
        (units.clock, 18_243, "5:04:03"),
        (units.clock, 97_445, "1d 03:04:05"),
        (units.clock, None, "-:--"),
    ],
)
def test_numbers_as_text(function, value, text):
    assert function(value) == text


# Without a terminal --------------------------------------------------------------------------


def test_one_line_per_record_without_a_terminal(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress(200, terminal=False)
    shown.status("compiling")
    shown.update(RECORD)
    now += 20.0  # the second ten steps took 2 s each, an evaluation included
    shown.evaluation({"step": 20, "eval": True, "loss": 2.5, "accuracy": 0.4, "eval_seconds": 0.5})
    shown.update({**RECORD, "step": 20, "mfu": 0.41, "accuracy": np.float32(0.5)})
    shown.note("checkpoint 20 committed")
    shown.close()
    assert caplog.messages == [
        "step  10/200  loss 2.413  accuracy 0.4500  grad 1.200  lr 3.00e-04  12.4k tokens/s  "
        "41.5 ms/step  limit: compute  0:08 left",
        "evaluation  step 20  loss 2.500  accuracy 0.4000  (500 ms)",
        "step  20/200  loss 2.413  accuracy 0.5000  grad 1.200  lr 3.00e-04  12.4k tokens/s  "
        "41.5 ms/step  mfu 41.0%  limit: compute  6:00 left",
        "checkpoint 20 committed",
    ]


def test_a_record_with_nothing_but_a_step_is_shown(caplog):
    shown = Progress(5, terminal=False)
    shown.update({"step": 0, "loss": float("nan")}, step=1)
    shown.update({"step": 2, "loss": 1.0, "samples_per_second": 250.0})
    assert caplog.messages[0] == "step 1/5  loss nan"
    assert caplog.messages[1].startswith("step 2/5  loss 1.000  250 samples/s")


def test_processes_that_do_not_speak(caplog):
    shown = Progress(5, enabled=False, terminal=True)
    shown.status("compiling")
    shown.update(RECORD)
    shown.evaluation(RECORD)
    shown.note("x")
    shown.close()
    assert caplog.messages == []


def test_lines_in_a_log_file_and_no_rich():
    code = (
        "import logging, sys\n"
        "from jaxtrain.progress import Progress\n"
        "progress = Progress(3)\n"
        "progress.update({'step': 1, 'loss': 2.0})\n"
        "logging.basicConfig()\n"  # a library that does this later doubles nothing
        "logging.getLogger('jaxtrain.checkpoint').warning('step 9 is not whole')\n"
        "logging.getLogger('jaxtrain').error('lost')\n"
        "progress.close()\n"
        "assert 'rich' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    lines = result.stderr.splitlines()
    expected = ["step 1/3  loss 2.000", "warning: step 9 is not whole", "error: lost"]
    assert [re.sub(f"^{stamp}", "", line) for line in lines] == expected
    assert all(re.match(stamp, line) for line in lines)


def test_a_program_with_its_own_logging_keeps_it(monkeypatch):
    logger = logging.getLogger("jaxtrain")
    monkeypatch.setattr(logger, "handlers", [])
    progress.setup_logging()  # pytest's handlers are on the root logger
    assert logger.handlers == []
    assert logger.propagate


# On a terminal -------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal that interprets what it is sent, as far as rich's display goes."""

    def __init__(self, width: int) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        self.file = os.fdopen(slave, "w", buffering=1, encoding="utf-8")
        self.sent = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            self.sent += data

    def screen(self) -> list[str]:
        """Closes the terminal and gives the lines that stand on it."""
        self.file.close()
        self._thread.join()
        os.close(self._master)
        lines, row, column = [""], 0, 0
        for match in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", self.sent.decode(), re.DOTALL):
            argument, code, char = match.groups()
            if code == "A":
                row -= int(argument or 1)
            elif code == "K":
                assert argument == "2"
                lines[row] = ""
            elif char == "\r":
                column = 0
            elif char == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif char is not None:
                lines[row] = lines[row].ljust(column)
                lines[row] = lines[row][:column] + char + lines[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Puts standard error on a terminal of 80 columns, and logging as in a fresh process.

    Called inside the test: pytest puts its handlers on the root logger for each of its phases.
    """
    made = Terminal(80)
    monkeypatch.setattr(sys, "stderr", made.file)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("jaxtrain")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.root, "handlers", [])
    return made


def test_the_bar_and_the_lines_above_it(monkeypatch, capsys):
    terminal = on_terminal(monkeypatch)
    shown = Progress(20)
    shown.status("compiling the step")
    shown.note("compiled in 12.3 s")
    shown.update(RECORD)
    logging.getLogger("jaxtrain.checkpoint").warning("step 9 is not whole")
    sys.stderr.write("a plain line\n")
    print("the program's output")
    shown.evaluation({"step": 20, "loss": 2.5, "accuracy": 0.4, "eval_seconds": 0.5})
    shown.update({**RECORD, "step": 20, "input_wait_seconds": 0.02})
    shown.close()
    shown.close()
    sys.stderr.write("after\n")
    screen = terminal.screen()
    assert screen[:4] == [
        "compiled in 12.3 s",
        "warning: step 9 is not whole",
        "a plain line",
        "evaluation  step 20  loss 2.500  accuracy 0.4000  (500 ms)",
    ]
    assert re.fullmatch(r"20/20  \u2501+  100%  0:00 elapsed", screen[4])
    # In 80 columns the learning rate and the gradient norm make room for what matters more.
    details = "loss 2.413  accuracy 0.4500  12.4k tokens/s  41.5 ms/step  limit: input"
    assert screen[5:] == [details, "after", ""]
    sent = terminal.sent.decode()
    assert "limit: compute" in sent
    assert "\x1b[33mwarning:" in sent
    assert capsys.readouterr().out == "the program's output\n"  # a pipe stays a pipe


def test_the_bar_shows_a_status_until_the_run_goes_on(monkeypatch):
    terminal = on_terminal(monkeypatch)
    shown = Progress(20, start_step=5)
    shown.status("evaluating")
    shown._bar._drawn = 0.0  # as if the last drawing were long ago
    shown.status("evaluating")
    shown.update(RECORD)
    shown.close()
    sent = terminal.screen(), terminal.sent.decode()
    assert sent[0][0].startswith("10/20")
    assert re.search(r" 5/20\x1b.*evaluating.*10/20\x1b", sent[1], re.DOTALL)


def test_handlers_of_the_program_write_above_the_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    # What logging.basicConfig() leaves behind: a handler that holds the standard error of its time.
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    shown = Progress(20)
    shown.update(RECORD)
    logging.getLogger("jaxtrain").info("from jaxtrain")
    logging.getLogger("other").warning("from another library")
    shown.close()
    logging.getLogger("other").warning("later")
    screen = terminal.screen()
    assert screen[:2] == ["from jaxtrain", "from another library"]
    assert screen[2].startswith("10/20  \u2501")
    assert screen[4:] == ["later", ""]


def test_killed_while_the_bar_is_shown_the_cursor_is_there(monkeypatch):
    terminal = on_terminal(monkeypatch)
    shown = Progress(20)
    shown.update(RECORD)
    os.write(terminal.file.fileno(), b"killed here")
    shown.close()
    terminal.screen()
    sent = terminal.sent[: terminal.sent.index(b"killed here")]
    assert sent.rfind(b"\x1b[?25h") > sent.rfind(b"\x1b[?25l") >= 0


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch, term):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("TERM", term)
    shown = Progress(20)
    shown.note("plain")
    shown.close()
    assert terminal.screen() == ["plain", ""]
