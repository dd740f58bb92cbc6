"""Which examples a model is fine-tuned on: section `data` of its experiment."""

import dataclasses

from jaxtrain.config import DataConfig, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesConfig(DataConfig):
    """Which examples, and how they become rows."""

    source: str = field(
        "",
        help="JSON lines (.jsonl, .gz, .zst): a file, a folder, a glob, or several with commas "
        'between. A record is {"prompt": ..., "completion": ...}, or {"messages": [{"role": ..., '
        '"content": ...}, ...]}',
    )
    tokenizer: str = field(
        "", help="bytes, a tokenizer.json, or a directory with one; empty: that of the model"
    )
    chat_template: str = field(
        "", help="file with a Jinja template for messages; empty: that of the tokenizer"
    )
    sequence_length: int = field(
        1024,
        unit="tokens",
        minimum=2,
        help="length of a row, which holds one or more examples; longer ones are left out",
    )
    validation_fraction: float = field(
        0.05, minimum=0, maximum=0.5, help="share of the records held out for evaluation; 0: none"
    )
    shuffle: bool = field(True, help="take the rows in a new random order in each epoch")
