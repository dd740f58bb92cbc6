"""What the loop does about a step whose loss, gradient or parameters are not finite."""

import logging
import math
from collections.abc import Mapping

from jaxtrain.errors import NonFiniteError

__all__ = ["NonFiniteGuard"]

_logger = logging.getLogger("jaxtrain")


class NonFiniteGuard:
    """Counts the steps that the compiled step left out, and ends the run when there are too many.

    The step itself keeps the old state when it meets a non-finite value, so nothing is lost by
    learning of it one step late.

    Args:
        max_skipped: how many bad steps in a row are left out; 0 ends the run at the first.
        skipped: bad steps so far, over all resumes.
        in_a_row: how many of them just now.
    """

    def __init__(self, max_skipped: int, skipped: int = 0, in_a_row: int = 0) -> None:
        self._max_skipped = max_skipped
        self.skipped = skipped
        self.in_a_row = in_a_row

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps; the arguments of a guard that goes on from there."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def check(
        self,
        step: int,
        samples: range,
        metrics: Mapping[str, float],
        *,
        is_applied: bool,
        is_finite: bool,
        has_checkpoint: bool,
    ) -> None:
        """Takes note of a step.

        Args:
            step: number of the step, counted from 1.
            samples: positions of its samples in the order of the run.
            metrics: of the step; they serve to name what is bad, and decide nothing.
            is_applied: the step's own flag: whether the batch changed the state.
            is_finite: the step's own flag: whether all was finite, the new parameters too.
            has_checkpoint: whether there is one to go back to.

        Raises:
            NonFiniteError: when the run must end.
        """
        if is_finite:
            self.in_a_row = 0
            return
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if is_applied:
            bad = [name for name in ("learning_rate", "param_norm") if name in bad]
        where = (
            f"{' and '.join(bad) or 'the model state'} not finite at step {step} "
            f"(samples {samples.start} to {samples.stop - 1} of the order)"
        )
        if is_applied:
            # Loss and gradient were fine, the update overflowed: there is no old state to keep.
            raise NonFiniteError(
                f"{where}: an update made parameters overflow; restart from the last checkpoint "
                "with a lower optimizer.learning_rate or with optimizer.clip_norm."
            )
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row <= self._max_skipped:
            _logger.warning("%s: left out, %d so far", where, self.skipped)
            return
        before = "the checkpoints before it are finite"
        if not has_checkpoint:
            before = "there is no checkpoint before it"
        so_far = f", {self.in_a_row} in a row" if self._max_skipped else ""
        raise NonFiniteError(
            f"{where}{so_far}; {before}. Look at these samples, lower optimizer.learning_rate, or "
            "go on with --nonfinite=skip:N, which leaves out up to N such steps in a row."
        )

    def refuse_evaluation(self, step: int, means: Mapping[str, float]) -> NonFiniteError | None:
        """Takes note of an evaluation: of a finite state, so there is nothing to leave out.

        Args:
            step: whose parameters were evaluated.
            means: of the evaluation.

        Returns:
            The error to end the run with, once its state is saved; None: the run goes on, with a
            warning if the loss is not finite.
        """
        bad = [n for n in ("loss", "ema_loss") if not math.isfinite(means.get(n, 0.0))]
        if not bad:
            return None
        where = f"{' and '.join(bad)} not finite in the evaluation of step {step}"
        if self._max_skipped:
            _logger.warning("%s: the run goes on, as nonfinite=skip says", where)
            return None
        return NonFiniteError(
            f"{where}, though the parameters are finite. Look at the evaluation data, lower "
            "optimizer.learning_rate and start anew, or go on with --nonfinite=skip:N."
        )
