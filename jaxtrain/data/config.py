"""How training data is loaded, whatever it is; an experiment's section `data` derives from it."""

import dataclasses
import re

from jaxtrain.errors import ConfigError
from jaxtrain.fields import Config, field

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What every run has in its section `data`."""

    num_workers: str = field(
        AUTO,
        on_resume="free",
        help="processes that read training data ahead; 0: a thread of the run does; auto: as many "
        "as keep up with the first steps, none where the thread does",
    )

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, int) and not isinstance(self.num_workers, bool):
            object.__setattr__(self, "num_workers", str(self.num_workers))
        super().__post_init__()
        if not re.fullmatch(r"auto|[0-9]{1,4}", self.num_workers):
            raise ConfigError(
                f"num_workers={self.num_workers} must be auto or a number of processes, from 0"
            )

    @property
    def worker_count(self) -> int | None:
        """The number asked for; None: to be found out."""
        return None if self.num_workers == AUTO else int(self.num_workers)
