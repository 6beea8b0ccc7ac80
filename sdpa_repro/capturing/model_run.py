"""Capture one prefill of a model: every padded length that is asked for, under one session."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sdpa_repro import ranks
from sdpa_repro.capturing import load_errors, report
from sdpa_repro.capturing.placement import target_device
from sdpa_repro.capturing.prefill import forward, padded, prepare, totals
from sdpa_repro.capturing.recorder import Stopped, listening
from sdpa_repro.capturing.records import Options
from sdpa_repro.capturing.session import Session
from sdpa_repro.environment import preload as run_preloads
from sdpa_repro.environment import software, torch_folder
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.capturing.options import PrefillOptions
    from sdpa_repro.capturing.prefill import Prefill


def capture_model(
    prefill_options: PrefillOptions,
    out: str | os.PathLike[str],
    options: Options,
    *,
    preload: Sequence[str | os.PathLike[str]] = (),
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[str], None],
    unpadded: bool = False,
) -> report.Report:
    """Run the model once for each total length and report; `preload` is run in this process first.

    unpadded: run the prompt without padding first and report under `prefills`, in words, and `moved`, in numbers, what
    padding does to the next token. Under torchrun each rank runs its share of the lengths, or with a `tp_plan` its part
    of the model for all of them, and reports for itself (see `together`). When the model fails, as it does when another
    rank dies, `failed` says how. Raises InputError for what the user can mend: the model, the inputs, the folder, a
    preload file.
    """
    preloaded = run_preloads([Path(path) for path in preload])
    for line in machine(prefill_options.device):
        progress(line)
    prefill = prepare(prefill_options, progress)
    lengths = totals(prefill, prefill_options)
    if unpadded:
        lengths = [prefill.length, *lengths]
    elif prefill_options.tp_plan is None:
        lengths = ranks.mine(lengths)
    for line in [*subject(prefill), *prefill.notes]:
        progress(line)
    facts = {"model": prefill.name, **(origin or {})}
    session = Session(out, options, progress=progress, origin=facts, preloaded=preloaded)
    interrupted, failed, logits = False, None, {}
    try:
        with listening(session):
            for total in lengths:
                progress(f"total length {total} ({total - prefill.length} of padding): {residues(total)}")
                session.note(total_length=total, padding=_padding(prefill, total))
                try:
                    logits[total] = forward(prefill, padded(prefill, total))
                except Exception as error:
                    if isinstance(error, InputError) and not session.calls and ranks.world() == 1:
                        raise
                    failed = _failure(error)
                    break
    except Stopped:
        progress("stopped at the first wrong call")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        session.close()
    found = report.of_session(session.summary(), Path(out), preloaded)
    found["environment"] = software(prefill.device)
    found["interrupted"], found["failed"] = interrupted, failed
    found["prefills"] = _beside_unpadded(logits, prefill.length) if unpadded else []
    found["moved"] = _moved(logits, prefill.length) if unpadded else []
    return found


def _failure(error: Exception) -> str:
    """How a prefill failed: the model's own error is no fault of this program, and what was recorded stays of use."""
    text = load_errors.first_line(error)
    text = text if isinstance(error, InputError) else f"the model raised {type(error).__name__}: {text}"
    return f"rank {ranks.rank()}: {text}" if ranks.world() > 1 else text


def _beside_unpadded(logits: Mapping[int, Tensor], length: int) -> list[str]:
    """One line for each padded length: how far its next-token logits (B, vocabulary) are from the unpadded ones."""
    plain, lines = logits.get(length), []
    for total, here in logits.items():
        if plain is None or total == length:
            continue
        first, then = plain.argmax(-1).tolist(), here.argmax(-1).tolist()
        moved = float((here - plain).abs().max())
        tokens = f"stays {first[0]}" if first == then else f"changes from {first[0]} to {then[0]}"
        lines.append(
            f"padding from {length} to {total} tokens moves the next-token logits by up to {moved:.2g}; "
            f"the likeliest token {tokens}"
        )
    return lines


def _moved(logits: Mapping[int, Tensor], length: int) -> list[dict[str, Any]]:
    """For each padded length: `total`; `shift`, the root mean square over the vocabulary by which the next-token
    logits (B, vocabulary) moved, over the standard deviation of the unpadded ones, of the row where that is largest;
    `flipped`, whether a likeliest token changed."""
    plain = logits.get(length)
    if plain is None:
        return []
    spread = plain.double().std(-1)
    found = []
    for total, here in logits.items():
        if total != length:
            shift = ((here.double() - plain.double()).square().mean(-1).sqrt() / spread).nan_to_num(nan=math.inf)
            flipped = bool((here.argmax(-1) != plain.argmax(-1)).any())
            found.append({"total": total, "shift": float(shift.max()), "flipped": flipped})
    return found


def machine(device: str | None) -> list[str]:
    """What is being tested, in lines for the user: torch, transformers, GPU, driver. InputError without that device."""
    found = software(target_device(device))
    lines = [f"torch {found['torch']} at {torch_folder()}", f"transformers {found['transformers']}"]
    if found.get("gpu"):
        return [*lines, f"{found['gpu']}, compute capability {found.get('capability')}, driver {found.get('driver')}"]
    return [*lines, f"no GPU in use, CPU capability {found.get('cpu')}"]


def subject(prefill: Prefill) -> list[str]:
    """The model and its prompt, in lines for the user."""
    return [
        f"{prefill.name}, {str(prefill.dtype).removeprefix('torch.')} on {prefill.device}",
        f"prompt of {prefill.length} tokens, padded on the {prefill.padding_side}",
    ]


def residues(length: int) -> str:
    """The remainders that decide whether a kernel has a partly filled tile of query rows."""
    return f"length % 32 == {length % 32}, length % 64 == {length % 64}"


def _padding(prefill: Prefill, total: int) -> dict[str, Any]:
    return {"tokens": total - prefill.length, "side": prefill.padding_side}
