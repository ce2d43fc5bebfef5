"""Where the tokens of a run come from: shards, the embedded corpus, or a function of the user's own.

Imports no torch, so that data that cannot be used is refused before anything slow begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Config
from slipstream.config.objects import fetch
from slipstream.data.corpus import embedded
from slipstream.data.prepare import Progress
from slipstream.data.tokens import TokenDataset
from slipstream.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def data_folder(config: Config, progress: Progress = lambda *_: None) -> Path | None:
    """The shards of the run, None where its data is a function; the embedded corpus is tokenised on first use."""
    if config.data.module is not None:
        return None
    if config.data.path is not None:
        return Path(config.data.path)
    assert config.model.vocab is not None
    return embedded(config.model.vocab, progress=progress)


def datasets(config: Config, folder: Path | None) -> tuple[Dataset, Dataset]:
    """(training, validation); a batch is one group."""
    rows = config.pipeline.microbatches * config.pipeline.microbatch_size
    if folder is None:
        return OwnData(config, "train", rows), OwnData(config, "valid", rows)
    options: dict[str, Any] = {
        "vocab": config.model.vocab,
        "mask_document_ends": config.data.mask_documents,
    }
    train = TokenDataset(folder, "train", config.data.sequence, rows, config.train.seed, **options)
    valid = TokenDataset(folder, "valid", config.data.sequence, rows, shuffle=False, **options)
    return train, valid


class OwnData:
    """Batches out of the user's own function.

    data.module names a function `NAME(split, rows, sequence, seed)`, `split` being "train" or "valid". It returns
    `batch(group) -> (inputs, targets)`, both [rows, sequence] of whole numbers; a target of -100 does not count.
    """

    paths: tuple[Path, ...] = ()
    num_windows = 1 << 40  # as many as are asked for

    def __init__(self, config: Config, split: str, rows: int) -> None:
        assert config.data.module is not None
        self.batch_size, self._config, self._split = rows, config, split
        make = fetch("data.module", config.data.module)
        self._batch = make(split, rows, config.data.sequence, config.train.seed)

    def batch(self, group: int) -> tuple[Tensor, Tensor]:
        import torch

        inputs, targets = (torch.as_tensor(part).to(torch.int64) for part in self._batch(group))
        wanted, vocab = (self.batch_size, self._config.data.sequence), self._config.model.vocab
        where = f"data.module = '{self._config.data.module}', {self._split} group {group}"
        for name, part in (("inputs", inputs), ("targets", targets)):
            if tuple(part.shape) != wanted:
                raise DataError(
                    f"{where}: {name} are {tuple(part.shape)}, expected [rows, sequence] = {wanted}."
                )
            if vocab is not None and int(part.max()) >= vocab:
                raise DataError(
                    f"{where}: {name} hold token {int(part.max())}, and the model's vocabulary is {vocab}. "
                    "Set model.vocab."
                )
        return inputs, targets

    def fingerprint(self) -> str:
        """A function has no content to hash: its name stands for it."""
        return f"{self._config.data.module} at seed {self._config.train.seed}"

    def contents(self) -> str:
        return self.fingerprint()


Dataset = TokenDataset | OwnData  # `batch` is a pure function of the group, so that a run can be resumed
