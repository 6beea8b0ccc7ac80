"""Models and their configurations, loaded the way transformers documents."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sdpa_repro import ranks
from sdpa_repro.capturing import layers, load_errors
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.placement import check_fits, has_accelerate, stored_dtype, target_device, target_dtype
from sdpa_repro.errors import InputError

OLDEST = (5, 13)
"""The first transformers release that works: it has Gemma 4 Unified and the names used here."""

AUTO_CLASSES = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
)
"""Auto classes of models that take a prompt, in the order they are asked whether they know one."""


def transformers_version() -> str:
    """The installed transformers' version; InputError with the line to type when missing or too old."""
    install = f"pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"transformers is not installed: {install}") from None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise InputError(f"transformers {version} is too old: {install}")
    return version


def load_config(options: PrefillOptions) -> Any:
    """The configuration of `options.model`, cut to `options.layers`. Raises InputError."""
    name = existing(str(options.model))
    with _explained(options):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            name, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    if options.layers is None:
        return config
    stored = config.to_dict()
    needed = layers.enough(stored, options.layers)
    if needed != options.layers and not options.random_weights:
        raise InputError(
            f"the first {options.layers} layers of {display_name(name)} do not end in a full-attention layer: "
            f"--layers {needed}, or add --random-weights"
        )
    with _explained(options):
        short = type(config).from_dict(layers.shortened(stored, options.layers, prefix=not options.random_weights))
    short.architectures = config.architectures
    return short


def load_model(config: Any, options: PrefillOptions) -> Any:
    """The model in evaluation mode, attention through SDPA, from its weights or with random ones.

    Placement: `options.device` if given; all devices through accelerate when it is there and a GPU too;
    otherwise the first GPU or the CPU. Under torchrun one GPU a rank, or a part of the model a rank with
    `options.tp_plan`. Raises InputError.
    """
    name = existing(str(options.model))
    device = target_device(options.device)
    with _explained(options, device):
        auto = auto_class(config, name, trust_remote_code=options.trust_remote_code)
        alone = options.device is None and ranks.world() == 1
        spread = alone and device.type != "cpu" and has_accelerate() and not options.random_weights
        split = _split(options)
        if not spread and not split:
            check_fits(auto, config, target_dtype(options.dtype), device, display_name(name))
        if options.random_weights:
            return _random(auto, config, options, device)
        model = auto.from_pretrained(
            name,
            config=config,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            dtype=target_dtype(options.dtype) or "auto",
            attn_implementation="sdpa",
            **({"device_map": "auto"} if spread else split),
        )
        return (model if spread or split else model.to(device)).eval()


def _split(options: PrefillOptions) -> dict[str, Any]:
    """What transformers is told so that each rank gets its part of the model; nothing without `options.tp_plan`."""
    if options.tp_plan is None:
        return {}
    if ranks.world() == 1:
        raise InputError("--tp-plan needs several ranks: torchrun --nproc-per-node 2 -m sdpa_repro capture --tp-plan …")
    if options.random_weights or options.device is not None:
        raise InputError(
            "--tp-plan loads stored weights onto every rank's own device: leave out --device, --random-weights"
        )
    import transformers.distributed

    config = transformers.distributed.DistributedConfig
    if "tp_plan" in getattr(config, "__dataclass_fields__", {}):
        return {"distributed_config": config(tp_plan=options.tp_plan)}
    return {"tp_plan": options.tp_plan}


def load_part(title: str, name: str, options: PrefillOptions) -> tuple[Any | None, str]:
    """What an auto class loads, or None and the reason in one line. InputError when it wants to run foreign code."""
    import transformers

    try:
        auto = getattr(transformers, title)
        found = auto.from_pretrained(name, revision=options.revision, trust_remote_code=options.trust_remote_code)
        return found, ""
    except Exception as error:
        if any("trust_remote_code" in str(link) for link in load_errors.causes(error)):
            raise load_errors.explained(error, display_name(name), transformers.__version__) from error
        package = load_errors.missing_package(error)
        return None, f"it needs {package}" if package else load_errors.first_line(error).rstrip(":")


def auto_class(config: Any, name: str, *, trust_remote_code: bool = False) -> Any:
    """The auto class to load `config` with: the one whose class for it is among `config.architectures`.

    When none matches, the first that knows the configuration. Raises InputError for models that take no prompt.
    """
    import transformers

    wanted = set(getattr(config, "architectures", None) or ())
    remote = getattr(config, "auto_map", None) or {} if trust_remote_code else {}
    found = []
    for auto in (getattr(transformers, title, None) for title in AUTO_CLASSES):
        if auto is None:
            continue
        if auto.__name__ in remote:
            return auto
        if type(config) in auto._model_mapping and not (
            config.is_encoder_decoder and auto.__name__ == AUTO_CLASSES[-1]
        ):
            classes = auto._model_mapping[type(config)]
            known = [one for one in (classes if isinstance(classes, (tuple, list)) else (classes,)) if _takes_text(one)]
            if known:
                found.append((not {one.__name__ for one in known} & wanted, auto))
    if not found:
        raise InputError(
            f"{display_name(name)} ({config.model_type}) is not a model that continues a prompt: "
            "run your own script under `sdpa-repro capture -- script.py`"
        )
    return min(found, key=lambda pair: pair[0])[1]


def display_name(name: str) -> str:
    """The model's name without the folders above it: the hub id, or the last part of a path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def existing(name: str) -> str:
    """The folder or the hub id; InputError for a path that is not there or is no model folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} has no config.json: give the folder that save_pretrained wrote")
        return str(path)
    if path.exists():
        raise InputError(f"{name} is a file: give the folder it is in, or a model id")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise InputError(f"there is no folder {name}")
    return name


def _random(auto: Any, config: Any, options: PrefillOptions, device: torch.device) -> Any:
    """A model from its configuration alone, made directly on the device and in the data type."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(options.seed)
        model = auto.from_config(
            config,
            dtype=target_dtype(options.dtype) or stored_dtype(config),
            attn_implementation="sdpa",
            trust_remote_code=options.trust_remote_code,
        )
    return model.to(device).eval()


def _takes_text(model_class: Any) -> bool:
    """Whether a model's prompt is tokens: encoders of images or sound alone have no input_ids."""
    return "input_ids" in inspect.signature(model_class.forward).parameters


@contextmanager
def _explained(options: PrefillOptions, device: object = "cpu") -> Iterator[None]:
    """Turn whatever transformers raises in the block into one line for the user."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if load_errors.is_out_of_memory(error):
            raise load_errors.out_of_memory(device) from error
        name = display_name(str(options.model))
        version = importlib.metadata.version("transformers")
        raise load_errors.explained(error, name, version, revision=options.revision) from error
