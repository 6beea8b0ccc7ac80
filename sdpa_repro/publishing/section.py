"""Everything about one dump that a page shows: the dump, its explanation, and the pictures' data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sdpa_repro.dump import Dump, load
from sdpa_repro.explaining.explain import Explanation, suspect
from sdpa_repro.mask import MaskDescription, describe, first_place
from sdpa_repro.publishing.heat import Heat, heat
from sdpa_repro.publishing.length_strip import Strip, strips
from sdpa_repro.publishing.mask_grid import MaskGrid, mask_grid
from sdpa_repro.publishing.published import Published
from sdpa_repro.replaying.backends import Backend
from sdpa_repro.replaying.cells import Cell
from sdpa_repro.replaying.replay import Replay
from sdpa_repro.replaying.worker import Worker


@dataclass(frozen=True)
class Section:
    """One dump on a page. Build it with `section`.

    script: the text of `repro.py`, "" without one; `script_run` says in a phrase how it ended, `script_fails` whether
    it fails as it should, `closed` whether it needs no other file. notes: sentences for below the script.
    """

    dump: Dump
    explanation: Explanation
    mask: MaskDescription
    heat: Heat
    grid: MaskGrid | None
    script: str = ""
    script_run: str = ""
    script_fails: bool | None = None
    closed: bool = True
    notes: tuple[str, ...] = ()

    @property
    def replay(self) -> Replay:
        """The replay in the captured dtype."""
        return self.explanation.replay

    @property
    def cell(self) -> Cell | None:
        """The table's cell of the backend that is explained, else of the default path."""
        name = self.explanation.backend or Backend.DEFAULT.value
        mine = [cell for cell in self.replay.cells if cell.dtype == self.replay.dtype]
        return next((cell for cell in mine if cell.backend == name), None)

    @property
    def strips(self) -> list[Strip]:
        """Sweeps of lengths, those that decide first; empty when no lengths were tried."""
        return strips(self.explanation.length_rule)

    @property
    def preloaded(self) -> dict[str, str]:
        """Files that ran before torch's own kernels, here or at capture: name → sha256."""
        records = (*self.replay.captured_with, *self.replay.preloaded)
        return {str(record.get("name")): str(record.get("sha256", "")) for record in records}


def section(
    explanation: Explanation,
    *,
    preload: Sequence[str | Path] = (),
    worker: Worker | None = None,
    published: Published | None = None,
    notes: Sequence[str] = (),
) -> Section:
    """Gather what a page shows of an explained dump; of `published`, the script and how its run ended.

    Runs three kernels of the call once more, in a worker process, for the error of each row; nothing is explained
    again. worker: as for `heat`. Raises InputError when the dump or a preload cannot be read.
    """
    dump = load(explanation.path)
    replayed = explanation.replay
    backend = Backend(explanation.backend) if explanation.backend else suspect(replayed) or Backend.DEFAULT
    picture = heat(dump, backend, device=replayed.device, preload=preload, worker=worker)
    told = describe(dump.call)
    place = (picture.bad[0].batch, picture.bad[0].worst[0]) if picture.bad else first_place(told)
    grid = mask_grid(dump.call, *place)
    plain = Section(dump, explanation, told, picture, grid, notes=tuple(notes))
    return with_script(plain, published) if published is not None else plain


def with_script(plain: Section, published: Published) -> Section:
    """The section with the script of `published`, read from its file; unchanged when no script was written."""
    if published.script is None:
        return plain
    run = published.run
    smaller = ("the script is about the smallest call found that still fails, the page about the one it came from",)
    return replace(
        plain,
        script=published.script.read_text(encoding="utf-8"),
        script_run="" if run is None else f"{run.ending()}, {run.seconds:.0f} s, {run.where}",
        script_fails=None if run is None else run.fails,
        closed=published.dump is None or published.closed,
        notes=(*plain.notes, *(smaller if published.reduction else ()), *published.notes),
    )


def without_explanation(path: Path, replayed: Replay) -> Explanation:
    """A replay alone, in the form that `section` takes: nothing beyond the verdict was worked out."""
    backend = suspect(replayed)
    return Explanation(path, backend.value if backend else None, replayed, complete=True)
