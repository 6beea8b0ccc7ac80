"""Whether a dump is the call that was captured: same layout, and the same output bit for bit when run again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.dump import Dump, load
from sdpa_repro.environment import memory_layout, preload_records
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import load_outputs
from sdpa_repro.replaying.jobs import same_bits
from sdpa_repro.replaying.worker import Outcome, Worker

PROOF_SECONDS = 120.0


@dataclass(frozen=True)
class Fidelity:
    """Result of the comparison with what was captured; None means that it could not be compared (see `reason`)."""

    bit_equal: bool | None
    layout_equal: bool | None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        return {"bit_equal": self.bit_equal, "layout_equal": self.layout_equal, "reason": self.reason}

    def sentence(self) -> str:
        """One line for a person."""
        layout = {True: "layout as captured", False: "LAYOUT CHANGED", None: "layout not recorded"}[self.layout_equal]
        bits = {
            True: "output bit-equal to the captured one",
            False: "other bits than captured",
            None: "bits not compared",
        }
        return f"{layout}, {bits[self.bit_equal]}" + (f" ({self.reason})" if self.reason else "")


def prove(path: str | Path, preload: Sequence[str | Path] = ()) -> Fidelity:
    """Read the dump in a fresh process on the device it was captured on, run the call again, and compare.

    Raises InputError when the dump cannot be read.
    """
    records = preload_records(preload)
    dump = load(path)
    device = str(dump.context.get("device", "cpu"))
    with Worker(preload) as worker, tempfile.TemporaryDirectory(prefix="sdpa-repro-") as folder:
        saved = Path(folder) / "output.pt"
        place = {"dump": str(Path(path).resolve()), "device": device}
        found = worker.request({"do": "layout", **place}, PROOF_SECONDS)
        changes = layout_changes(dump.context.get("layout"), found.answer.get("layout"))
        job = {"do": "cell", **place, "dtype": "captured", "backend": Backend.DEFAULT.value, "runs": 1}
        outcome = worker.request({**job, "output": str(saved)}, PROOF_SECONDS)
        output = load_outputs(saved)["first"] if outcome.kind == "done" else None
        return compared(dump, torch.device(device), outcome, output, records, changes)


def compared(
    dump: Dump,
    device: torch.device,
    outcome: Outcome,
    output: Tensor | None,
    preloaded: Sequence[Mapping[str, str]],
    changes: list[str] | None,
) -> Fidelity:
    """Fidelity from the default path's result in the captured dtype and the layout's changes (None: unknown)."""
    layout_equal = None if changes is None else not changes
    said = list(changes or [])[:2]
    recorded = str(dump.context.get("device", "cpu")).partition(":")[0]
    if dump.output is None:
        said.append("no output was stored")
    elif dump.call.dropout_p > 0:
        said.append("dropout is random")
    elif recorded != device.type:
        said.append(f"other device: captured on {recorded}, replayed on {device.type}")
    elif output is None:
        said.append(outcome.reason or outcome.kind)
    else:
        equal = same_bits(dump.output.detach().cpu(), output)
        if not equal:
            said += differences(dump, outcome, preloaded) or ["nothing that was recorded explains it"]
        return Fidelity(equal, layout_equal, "; ".join(said))
    return Fidelity(None, layout_equal, "; ".join(said))


def differences(dump: Dump, outcome: Outcome, preloaded: Sequence[Mapping[str, str]]) -> list[str]:
    """What is different here from where the call was captured, as far as it can change bits."""
    said = []
    version = dump.environment.get("torch")
    if version and version != torch.__version__:
        said.append(f"other torch: captured with {version}, replayed with {torch.__version__}")
    gpu = dump.environment.get("gpu")
    if gpu and torch.cuda.is_available() and gpu != torch.cuda.get_device_name():
        said.append(f"other GPU: captured on {gpu}")
    before, now = _planted(dump.preloaded), _planted(preloaded)
    if before != now:
        said.append(f"preloaded {_names(preloaded)} here, {_names(dump.preloaded)} at capture")
    ran, chosen = (dump.live or {}).get("ran"), outcome.answer.get("chosen")
    if ran and chosen and "unknown" not in (ran, chosen) and ran != chosen:
        said.append(f"{ran} ran live, PyTorch takes {chosen} here")
    if outcome.answer.get("bit_stable") is False:
        said.append("the kernel is not deterministic")
    skipped = outcome.answer.get("not_restored")
    if skipped:
        said.append(f"not restored: {', '.join(map(str, skipped))}")
    return said


def _planted(records: Sequence[Mapping[str, str]]) -> set[str]:
    return {record.get("sha256", "") for record in records}


def _names(records: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(str(record.get("name")) for record in records) or "nothing"


def layout_changes(recorded: object, found: object) -> list[str] | None:
    """What of the recorded layout (`environment.memory_layout`) is different now; None when none was recorded.

    Distances recorded between tensors must be the same; new neighbours do not matter.
    """
    if not isinstance(recorded, Mapping) or not isinstance(found, Mapping):
        return None
    said = []
    for name, before in recorded.items():
        now = found.get(name)
        if not isinstance(before, Mapping) or not isinstance(now, Mapping):
            said.append(f"{name} is missing")
            continue
        for key, word in (("dtype", "dtype"), ("shape", "shape"), ("stride", "stride"), ("align", "data_ptr % 256")):
            if before.get(key) != now.get(key):
                said.append(f"{name} had {word} {before.get(key)}, has {now.get(key)}")
        distances, near = (near if isinstance(near := side.get("near"), Mapping) else {} for side in (before, now))
        moved = [other for other, distance in distances.items() if near.get(other) != distance]
        said += [f"{other} no longer begins {distances[other]} bytes from {name}" for other in moved if other > name]
    return said


def layout_of(dump: Dump) -> list[str] | None:
    """Changes of the loaded call's layout against what was recorded at capture."""
    return layout_changes(dump.context.get("layout"), memory_layout(dump.call))
