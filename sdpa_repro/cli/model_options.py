"""The options that choose a model, its prompt and its padding; shared by the verbs that run a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.capturing.options import PrefillOptions

Command = TypeVar("Command", bound=Callable[..., Any])

OPTIONS = (
    click.option("--model", metavar="ID|FOLDER", help="Hub id or folder. Default: the embedded tiny Gemma 4."),
    click.option("--image", "images", multiple=True, metavar="PATH|URL", help="Image of the prompt (repeatable)."),
    click.option("--prompt", metavar="TEXT", help="Prompt. Default: a short one."),
    click.option(
        "--input", "input_", metavar="ROWS.jsonl", help="A batch: messages, or prompt and images, on each line."
    ),
    click.option("--pad", type=int, metavar="N", help="Add N tokens of padding."),
    click.option(
        "--total-length", type=int, metavar="N", help="Pad to N tokens. Default: try every residue modulo 64."
    ),
    click.option(
        "--padding-side", type=click.Choice(["left", "right"]), help="Default: left; right for encoder-decoder models."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        help="Data type of the model. Default: that of its weights.",
    ),
    click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1. Default: all GPUs, or the CPU."),
    click.option(
        "--tp-plan",
        type=click.Choice(["auto"]),
        help="Under torchrun: split the model over the ranks (tensor parallel).",
    ),
    click.option("--layers", type=int, metavar="N", help="Keep N layers of the model."),
    click.option("--random-weights", is_flag=True, help="Build from the configuration alone, without weights."),
    click.option("--text-only", is_flag=True, help="Leave images out."),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
    click.option("--revision", metavar="NAME", help="Branch, tag or commit on the hub."),
)

NAMES = (
    "model",
    "images",
    "prompt",
    "input_",
    "pad",
    "total_length",
    "padding_side",
    "dtype",
    "device",
    "layers",
    "random_weights",
    "text_only",
    "trust_remote_code",
    "revision",
    "tp_plan",
)
"""Parameter names that `model_options` gives a command and `build_options` takes."""

NEEDS_MODEL = (("prompt", "--prompt"), ("images", "--image"), ("input_", "--input"), ("revision", "--revision"))


def model_options(command: Command) -> Command:
    """Add the model options to a click command; see `NAMES` for its parameters."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def build_options(**values: Any) -> PrefillOptions:
    """The prefill that the options ask for.

    values: the parameters of `NAMES`, missing ones as not given. Raises InputError, one line, for options
    that contradict each other or make no sense.
    """
    from sdpa_repro.capturing.options import PrefillOptions

    _check_numbers(values)
    _check_prompt(values)
    chosen = {name: value for name, value in values.items() if value is not None}
    if "input_" in chosen:
        chosen["input"] = chosen.pop("input_")
    if "images" in chosen:
        chosen["images"] = tuple(chosen["images"])
    return PrefillOptions(**chosen)


def given(**values: Any) -> list[str]:
    """The model options that were given, by parameter name: none may go with a script or a dump."""
    absent: tuple[Any, ...] = (None, False, ())
    return [name for name in NAMES if not any(values.get(name) is nothing for nothing in absent)]


def model_words(values: Mapping[str, Any]) -> list[object]:
    """The model options that were given, as words of a command line that gives them again."""
    said: list[object] = []
    for name in given(**values):
        value = values[name]
        flag = "--" + {"images": "image"}.get(name, name.rstrip("_").replace("_", "-"))
        for each in value if isinstance(value, tuple) else (value,):
            said += [flag] if each is True else [flag, each]
    return said


def _check_numbers(values: dict[str, Any]) -> None:
    if values.get("pad") is not None and values.get("total_length") is not None:
        raise InputError("--pad and --total-length say the same thing: give one of them")
    for name, least in (("pad", 0), ("total_length", 1), ("layers", 1)):
        value = values.get(name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value} is too small: at least {least}")


def _check_prompt(values: dict[str, Any]) -> None:
    if not values.get("model"):
        for name, flag in NEEDS_MODEL:
            if values.get(name):
                raise InputError(f"{flag} needs --model: the embedded model has no tokenizer and makes its own prompt")
        if values.get("tp_plan"):
            raise InputError("--tp-plan needs --model: the embedded model is not split")
    if values.get("input_") and (values.get("prompt") or values.get("images")):
        raise InputError("--input holds the prompts and images: leave out --prompt and --image")
    if values.get("text_only") and values.get("images"):
        raise InputError("--text-only leaves images out: leave out --image")
