"""What limits a step, and how much of the hardware's peak it uses.

Pure functions of a training record (`jaxtrain.metrics`) and of tables; no backend is started.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.units import seconds


def limiting(record: Mapping[str, Any]) -> str:
    """Names what limits the step: 'compute', 'input', 'transfer' or 'logging/host'.

    The rule, on the times of a training record (`jaxtrain.metrics`; absent ones count as 0):

    1. Half of the step or more goes into Python around the step (host_seconds): 'logging/host'.
       Less than that hides behind the step that the device is computing meanwhile.
    2. A tenth of the step or more is spent waiting for the batch (input_wait_seconds): 'transfer'
       if the larger part of making a batch is its transfer, else 'input'.
    3. Otherwise the devices are the limit: 'compute'.
    """
    step = _positive(record, "step_seconds")
    wait, host = _positive(record, "input_wait_seconds"), _positive(record, "host_seconds")
    if step and host >= 0.5 * step and host >= wait:
        return "logging/host"
    if step and wait >= 0.1 * step:
        return "transfer" if transfer_share(record) > 0.5 else "input"
    return "compute"


def transfer_share(record: Mapping[str, Any]) -> float:
    """Share of the time to make a batch that is its transfer to the devices, 0 to 1.

    Without read_seconds: while the loop waits for batches the input thread is busy for the whole
    step, so what is not transfer is reading.
    """
    transfer = _positive(record, "h2d_seconds")
    read = _positive(record, "read_seconds")
    if record.get("read_seconds") is None:
        read = max(_positive(record, "step_seconds") - transfer, 0.0)
    return transfer / (transfer + read) if transfer else 0.0


def input_advice(record: Mapping[str, Any], num_workers: int) -> str:
    """What would help where 'input' is the limit: one line, with the times of a record.

    Args:
        record: of training.
        num_workers: processes that read; 0: a thread of the run does.
    """
    step, wait = _positive(record, "step_seconds"), _positive(record, "input_wait_seconds")
    reading = f"reading takes {seconds(_positive(record, 'read_seconds'))} for each batch"
    if num_workers:
        reading = f"{num_workers} input workers do not keep up"
        remedy = f"more of them (--data.num_workers={2 * num_workers}, if there are cores for them)"
    else:
        remedy = "input workers (--data.num_workers=auto, or a number)"
    return (
        f"steps wait for input {wait / step:.0%} of their time, because {reading}; {remedy}, faster"
        f" storage or less work per row would help"
    )


def _positive(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if value and value > 0 else 0.0


# Dense peak FLOP/s of one device: (start of jax's device_kind, bfloat16, float32). The float32
# column is what jax's default matmul precision uses for float32 arrays: TF32 units on NVIDIA GPUs
# from Ampere on, one bfloat16 pass on TPU (docs.jax.dev/en/latest/201/precision.html). The first
# match counts; a variant with other clocks (PCIe, NVL) is listed where it has numbers of its own.
#
# NVIDIA's pages list rates with 2:4 sparsity from Hopper on; they are halved here.
_PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    # "NVIDIA V100 Tensor Core GPU" datasheet, Jan 2020: single precision 15.7 (SXM2; 14 for PCIe,
    # which is not listed). No bfloat16 units; the 125 of its tensor cores are float16.
    ("Tesla V100-SXM2", None, 15.7e12),
    # "NVIDIA A100 Tensor Core GPU" datasheet, nvidia-1758950-r4: the same for SXM4 and PCIe.
    ("NVIDIA A100", 312e12, 156e12),
    # "NVIDIA H100 Tensor Core GPU Architecture" (white paper), which has the dense rates with a
    # decimal. The datasheet (nvidia.com/en-us/data-center/h100) says 1,979 and 989 with sparsity,
    # and 1,671 and 835 for NVL.
    ("NVIDIA H100 PCIe", 756e12, 378e12),
    ("NVIDIA H100 NVL", 835.5e12, 417.5e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12),
    ("NVIDIA H100 96GB HBM2e", 989.4e12, 494.7e12),
    # nvidia.com/en-us/data-center/h200: those of H100, 1,979 and 989; NVL 1,671 and 835.
    ("NVIDIA H200 NVL", 835.5e12, 417.5e12),
    ("NVIDIA H200", 989.4e12, 494.7e12),
    # "NVIDIA Blackwell Architecture Technical Brief", 2024, HGX B200 per GPU: 4.5 and 2.2 PFLOPS
    # with sparsity.
    ("NVIDIA B200", 2250e12, 1100e12),
    # cloud.google.com/tpu/docs, pages v5e, v5p and v6e, "Peak compute per chip (bf16)".
    ("TPU v5 lite", 197e12, 197e12),  # jax's name of v5e
    ("TPU v5e", 197e12, 197e12),
    ("TPU v5", 459e12, 459e12),  # jax's name of v5p
    ("TPU v6", 918e12, 918e12),  # "TPU v6 lite" is v6e
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device in matrix products, or None where no peak is known (any CPU).

    Args:
        device_kind: `jax.Device.device_kind`.
        dtype: "bfloat16" or "float32", the dtype of the computation.
    """
    for start, bfloat16, float32 in _PEAKS:
        if device_kind.startswith(start):
            return {"bfloat16": bfloat16, "float32": float32}.get(dtype)
    return None


def training_flops_per_token(
    num_params: int,
    *,
    num_frozen: int = 0,
    num_layers: int = 0,
    attention_dim: int = 0,
    sequence_length: int = 0,
) -> float:
    """FLOPs that one token costs in training, forward and backward: 6 N - 2 F + 12 L A T.

    The count of Chowdhery et al. 2022 (PaLM, appendix B), which most published utilisations use:
    what the model needs, not what is computed (remat adds nothing), attention over the whole
    sequence even where it is causal.

    Args:
        num_params: N, parameters that a token is multiplied with: a lookup table (embedding,
            learned positions) does not count, an output head does, tied or not.
        num_frozen: F, those of them without a gradient of their own.
        num_layers: L, layers with attention.
        attention_dim: A, query heads x head size.
        sequence_length: T.
    """
    return 6.0 * num_params - 2.0 * num_frozen + 12.0 * num_layers * attention_dim * sequence_length


class Throughput:
    """Turns the time of a step into rows, tokens and share of the peak per second.

    Args:
        rows_per_step: of the global batch.
        tokens_per_row: None for data that is not made of tokens.
        flops_per_token: see `training_flops_per_token`; None where nobody can say.
        peak_flops: of all devices together; None where no peak is known.
    """

    def __init__(
        self,
        rows_per_step: int,
        *,
        tokens_per_row: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._rows_per_step = rows_per_step
        self._tokens_per_row = tokens_per_row
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops

    def record(self, samples_seen: int, times: Mapping[str, float]) -> dict[str, float | None]:
        """The part of a record that speaks of amounts and speed.

        Args:
            samples_seen: rows since the start of the run.
            times: of `StepClock.read`; without them there is no speed.
        """
        tokens = self._tokens_per_row
        record: dict[str, float | None] = {"samples": samples_seen}
        if tokens is not None:
            record["tokens"] = samples_seen * tokens
        if times:
            rate = self._rows_per_step / times["step_seconds"]
            record |= {"samples_per_second": rate, **times}
            if tokens is not None:
                record |= {"tokens_per_second": rate * tokens, "mfu": None}
                if self._flops_per_token is not None and self._peak_flops:
                    record["mfu"] = rate * tokens * self._flops_per_token / self._peak_flops
        return record
