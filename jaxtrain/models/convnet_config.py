"""Configuration of the convolutional classifier. Imports no jax: `--help` needs only this."""

import dataclasses

from jaxtrain.config import Config, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNetConfig(Config):
    """Sizes of the classifier; the defaults fit the digits of scikit-learn."""

    num_classes: int = field(10, minimum=2, help="number of classes")
    in_channels: int = field(1, minimum=1, help="channels of the images")
    channels: int = field(16, minimum=1, help="channels of the first stage; each next has twice")
    num_stages: int = field(2, minimum=1, help="stages; from one to the next the image is halved")
    statistics_momentum: float = field(
        0.9, minimum=0, below=1, help="of the running mean and variance that evaluation uses"
    )
    dropout: float = field(0.0, minimum=0, below=1, help="rate, before the last layer")
