"""Everything about a run that can be known, and refused, before torch is imported: that takes seconds.

`prepare` fills in what the data and a model folder say; `check` refuses what cannot work on this machine.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from slipstream.config import Config, resolve
from slipstream.config.objects import check_place
from slipstream.config.resolve import overridable
from slipstream.config.settings import SYNCHRONOUS
from slipstream.data.shards import read_meta
from slipstream.errors import UserError, install
from slipstream.models.config_json import read_config, read_described, require_transformers
from slipstream.train import url
from slipstream.train.claim import is_run, newest_of, refuse_foreign
from slipstream.train.sources import data_folder, datasets

DEV = Path("/dev")
_LISTED = re.compile(r"\s*(\d|GPU-|MIG-)")  # a list of GPUs; those behind an entry that is none do not count
# NVIDIA, its Jetson twice, Linux under Windows, AMD.
GPU_FILES = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "dxg", "kfd")


def prepare(config: Config, *, world: int | None = None) -> Config:
    """The resolved run, with the shape of model.init_from and the vocabulary of the data."""
    return resolve(adopt_vocabulary(adopt_shape(config)), world=world)


def adopt_shape(config: Config) -> Config:
    """With model.init_from the folder's config.json is the shape; a key that contradicts it is refused."""
    if config.model.hf is not None:
        return _adopt_description(config)
    if config.model.init_from is None:
        return config
    found = read_config(Path(config.model.init_from))
    names = overridable(found)
    given = {name: getattr(config.model, name) for name in names if name in config.model.model_fields_set}
    wrong = {name: value for name, value in given.items() if value not in (None, getattr(found, name))}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise UserError(
            f"model.{name} = {value} contradicts model.init_from, whose config.json has {getattr(found, name)}. "
            f"Drop model.{name}."
        )
    values = {name: getattr(found, name) for name in names}
    return config.changed(model=values)


def _adopt_description(config: Config) -> Config:
    """With model.hf and weights to start from the vocabulary is theirs; without, the data's, else the file's."""
    model = config.model
    described = read_described(Path(str(model.hf)))
    if model.init_from is not None:
        read_described(Path(model.init_from))
        if model.vocab not in (None, described["vocab_size"]):
            raise UserError(
                f"model.vocab = {model.vocab} contradicts model.hf, whose config.json has {described['vocab_size']}, "
                "as the weights of model.init_from do. Drop model.vocab."
            )
    elif model.vocab is not None or adopt_vocabulary(config).model.vocab is not None:
        return config
    return config.changed(model={"vocab": described["vocab_size"]})


def adopt_vocabulary(config: Config) -> Config:
    """Unless the run names one, the model has the vocabulary that its shards were made with."""
    if config.data.path is None or config.model.vocab is not None:
        return config
    vocab = read_meta(Path(config.data.path)).get("vocab")
    if vocab is None:
        return config
    return config.changed(model={"vocab": vocab})


def check(config: Config) -> None:
    """Refuse what cannot work here. Of a resolved run; nothing is written."""
    refuse_foreign(Path(config.run.dir))
    fork = config.run.fork_from
    begins = (
        not is_run(Path(config.run.dir)) and config.checkpoint.remote is None
    )  # or it may go on from a copy
    if begins and fork is not None and newest_of(Path(fork)) is None:
        raise UserError(f"run.fork_from = '{fork}' has no checkpoint. Name a run folder or a step-N folder.")
    for name in config.train.trackers:
        if find_spec(name) is None:
            raise UserError(f"train.trackers names {name}, which is not installed. {install(name)}")
    if config.train.device == "cuda" and cpu_only():
        raise UserError(
            "train.device = 'cuda', and the torch that is installed was built without GPUs. Set train.device=cpu, or "
            "install another torch."
        )
    if config.pipeline.schedule in SYNCHRONOUS and config.data.mask_documents and torch_release() < (2, 13):
        raise UserError(
            f"data.mask_documents with pipeline.schedule={config.pipeline.schedule} needs torch 2.13 or later: before, "
            "torch's schedules pass no whole numbers from stage to stage. Use pipeline.schedule=2bw, or another torch."
        )
    named = {
        "model.module": config.model.module,
        "data.module": config.data.module,
        "train.callback": config.train.callback,
    }
    for key, place in named.items():
        if place is not None:
            check_place(key, place)
    if config.model.hf is not None:
        require_transformers()
    if config.checkpoint.remote is not None and config.checkpoint.keep:
        url.check(config.checkpoint.remote)
    if config.data.path is not None:
        datasets(config, data_folder(config))


def torch_release() -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu, without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def on_processors(config: Config) -> bool:
    """Whether its ranks work on processors, as far as that can be told without torch."""
    return config.train.device == "cpu" or (config.train.device == "auto" and (cpu_only() or not gpu_here()))


def gpu_here() -> bool:
    """Whether a driver shows a GPU that is not hidden from us. A torch built for GPUs may be anywhere."""
    names = ["CUDA_VISIBLE_DEVICES", *(["HIP_VISIBLE_DEVICES"] if _built_for("hip") else [])]
    if not all(_LISTED.match(os.environ.get(name, "0")) for name in names):
        return False
    return sys.platform != "linux" or any(any(DEV.glob(pattern)) for pattern in GPU_FILES)


def cpu_only() -> bool:
    """Whether the installed torch cannot use any GPU."""
    return _built_for("cuda") is False and _built_for("hip") is False


def _built_for(name: str) -> bool | None:
    """What the installed torch's version file says, None where it does not: to import it takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{name}\b[^=]*= (.*)$", text, re.MULTILINE)
    return None if found is None else found[1] != "None"
