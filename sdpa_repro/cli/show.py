"""`sdpa-repro show`: what a dump holds, tensor by tensor, its mask, where it came from and what it reveals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.show_text import print_dump
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from sdpa_repro.attention import AttentionCall
    from sdpa_repro.dump import Dump
    from sdpa_repro.mask import MaskDescription

BAD_INPUT = 2
REVEALS = (
    "key and value are the model's activations for the prompt: whoever has the model can recover the input from"
    " them, text and images",
    "query and output say as much; the mask tells the length of each prompt in the batch and where images are",
)
"""What somebody who gets the file learns, when it was captured from a model."""


@click.command(
    name="show",
    epilog=epilog(
        {0: "described", 2: "bad usage, or a file that cannot be read"},
        "sdpa-repro show dumps/L05-self_attn-call5-289x289.pt",
        "sdpa-repro show dumps/                     every dump in a folder",
    ),
)
@click.argument("paths", nargs=-1, required=True, metavar="DUMP...", type=PATH, shell_complete=dumps)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(paths: tuple[Path, ...], as_json: bool) -> None:
    """Describe dumps (files, or folders of them): tensors, layout, mask, flags, origin, what they reveal.

    Runs no attention.
    """
    from sdpa_repro import dump
    from sdpa_repro.environment import software

    files = _files(paths)
    shown: list[Path] = []
    documents: list[dict[str, Any]] = []
    failed = 0
    for file in files:
        try:
            loaded = dump.load(file)
            body = describe(loaded, file)
        except InputError as wrong:
            if len(files) == 1:
                raise
            output.warn(str(wrong))
            failed += 1
            continue
        if as_json:
            documents.append(body)
        else:
            if shown:
                output.line()
            print_dump(body)
        shown.append(file)
    if as_json:
        output.document("show", {"preloaded": [], "environment": software(), "dumps": documents})
    elif shown:
        output.next_command(output.shell("sdpa-repro", "replay", *shown))
    if failed:
        raise SystemExit(BAD_INPUT)


def _files(paths: tuple[Path, ...]) -> list[Path]:
    """The files, and the `.pt` files of the folders. Raises InputError for a folder without any."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob("*.pt"))
        if not found:
            raise InputError(f"no dump (*.pt) in {path}: give a dump, or make one with sdpa-repro capture")
        files += found
    return files


def describe(loaded: Dump, file: Path) -> dict[str, Any]:
    """All that `show` prints about a dump, as plain data; the body of one entry of the JSON document.

    Strings under `context`, `origin`, `environment`, `live`, `recipe` and `preloaded` are the dump's own.
    """
    from sdpa_repro import mask
    from sdpa_repro.dump import layout

    call = loaded.call
    told = mask.describe(call)
    batch, head = place = mask.first_place(told)
    picture = []
    if told.kind not in ("none", "empty", "invalid"):
        picture = mask.picture(call, batch=batch, head=head, ascii_only=not _writes_unicode())
    return {
        "file": str(file),
        "file_bytes": file.stat().st_size,
        "summary": summary(call, told, str(loaded.context.get("device", "cpu"))),
        "tensors": tensors(loaded),
        "near": layout(call)["near"],
        "mask": {**told.document(), "headline": told.headline, "picture": picture, "pictured": list(place)},
        "call": {
            "is_causal": call.is_causal,
            "scale": call.scale,
            "softmax_scale": call.softmax_scale,
            "enable_gqa": call.enable_gqa,
            "dropout_p": call.dropout_p,
        },
        "context": loaded.context,
        "origin": loaded.origin,
        "environment": loaded.environment,
        "live": loaded.live,
        "recipe": loaded.recipe,
        "preloaded": loaded.preloaded,
        "reveals": ["the tensors are made from a recipe and reveal nothing"] if loaded.recipe else list(REVEALS),
    }


def summary(call: AttentionCall, told: MaskDescription, device: str) -> str:
    """The call in one line: "query (1, 16, 289, 512) bfloat16 on cuda:0, key/value expanded from one head, ..."."""
    key, value, heads = _heads(call.key, call), _heads(call.value, call), call.query.dim() > 2
    parts = [f"query {tuple(call.query.shape)} {_dtype(call.query)} on {output.clean(device)[:40]}"]
    if heads:
        parts.append(f"key/value {key}" if key == value else f"key {key}, value {value}")
    if call.key.shape[-2] != call.query.shape[-2]:
        parts.append(f"{call.key.shape[-2]} keys")
    if call.value.shape[-1] != call.query.shape[-1]:
        parts.append(f"value head_dim {call.value.shape[-1]}")
    return ", ".join([*parts, told.headline])


def _heads(tensor: Tensor, call: AttentionCall) -> str:
    """How a key or value comes by its heads."""
    if tensor.dim() < 3:
        return "without heads"
    heads = tensor.shape[-3]
    if heads > 1 and tensor.stride(-3) == 0:
        return "expanded from one head"
    if call.query.dim() > 2 and heads != call.query.shape[-3]:
        return f"with {heads} head{'s' * (heads != 1)} for {call.query.shape[-3]}"
    return f"with {heads} head{'s' * (heads != 1)} of its own" if heads > 1 else "with one head"


def tensors(loaded: Dump) -> dict[str, dict[str, Any]]:
    """Layout of each tensor. `offset`: bytes from the start of the memory it shares with its neighbours.

    `stored_bytes`: bytes its viewed elements take in the file (a bit for an entry of a bool mask), counted for
    each tensor though shared ones are stored once.
    """
    from sdpa_repro.attention import overlaps_itself, viewed_once
    from sdpa_repro.dump import layout

    call = loaded.call
    told = layout(call)
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in {**call.tensors, **({} if loaded.output is None else {"output": loaded.output})}.items():
        known = dict(told["tensors"].get(name, {}))
        if "rule" in known:
            found[name] = {"rule": known["rule"]}
            continue
        once = viewed_once(tensor)
        bits = 1 if name == "attn_mask" and _dtype(tensor) == "bool" else 8 * tensor.element_size()
        pairs = [pair for pair in told["near"] if name in pair["names"]]
        before = [pair["distance"] * (1 if pair["names"][1] == name else -1) for pair in pairs]
        others = {other: pair for pair in pairs for other in pair["names"] if other != name}
        found[name] = {
            "dtype": _dtype(tensor),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": max([0, *before]),
            "align": tensor.data_ptr() % 256 if tensor.numel() else None,
            "stored_bytes": -(-once.numel() * bits // 8),
            "contiguous": tensor.is_contiguous(),
            "overlaps_itself": overlaps_itself(once) if tensor.numel() else False,
            "shares_memory_with": [other for other, pair in others.items() if pair["shared"]],
        }
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _writes_unicode() -> bool:
    return "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
