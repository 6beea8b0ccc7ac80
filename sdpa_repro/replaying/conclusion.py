"""What the captured dtype's cells say together: the verdict, who is guilty, and one sentence for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdpa_repro.known_issues import Match
from sdpa_repro.replaying.backends import MISSING, OUT_OF_MEMORY, Backend
from sdpa_repro.replaying.cells import SWALLOWED, Cell
from sdpa_repro.replaying.verdict import Bad, Status, Verdict
from sdpa_repro.visibility import ranges

LISTED_STRETCHES = 4
"""Stretches of indices written out in a sentence; more become a count."""

NARROW = "float8"
"""How dtypes begin that hardly any kernel takes."""

EXIT_STATUS = {
    Verdict.HEALTHY: 0,
    Verdict.BACKEND_WRONG: 1,
    Verdict.EAGER_WRONG: 1,
    Verdict.INVALID_CALL: 1,
    Verdict.UNREPRODUCIBLE: 3,
}


@dataclass(frozen=True)
class Live:
    """What was seen when the call was captured: the kernel that ran, where, and whether its output was wrong."""

    ran: str | None
    device_type: str
    wrong: bool | None
    planted: str = ""
    """Files that were preloaded at capture and are not now."""
    raised: str = ""
    """What the call raised instead of returning; running out of memory does not count."""

    @classmethod
    def of(
        cls, live: Mapping[str, Any] | None, context: Mapping[str, Any], origin: Mapping[str, Any] | None = None
    ) -> Live:
        """From a dump's `live`, `context` and `origin`, which may lack anything."""
        live = live or {}
        raised = str((origin or {}).get("raised") or "")[:200]
        raised = "" if OUT_OF_MEMORY.search(raised) else raised
        ran = live.get("ran")
        status, ratio = live.get("status"), live.get("ratio")
        wrong: bool | None = None
        if status in ("agrees", "diverges", "nonfinite"):
            wrong = status != "agrees"
        elif status is None and isinstance(ratio, (int, float)):
            wrong = not ratio <= 1.0
        wrong = True if raised else wrong
        device = str(context.get("device") or "cpu").partition(":")[0]
        return cls(ran if isinstance(ran, str) and ran != "unknown" else None, device, wrong, raised=raised)


@dataclass(frozen=True)
class Conclusion:
    """verdict, the guilty backends (worst news first), and the sentence."""

    verdict: Verdict
    guilty: tuple[str, ...]
    sentence: str

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]


def conclude(
    cells: Sequence[Cell], live: Live, device_type: str, *, batches: int = 1, heads: int = 0, undecided: str = ""
) -> Conclusion:
    """Judge the cells of the captured dtype.

    `batches` and `heads` (of query) word the sentence; `undecided` says why no row could decide anything.
    """
    by_name = {cell.backend: cell for cell in cells}
    maths = by_name.get(Backend.MATH.value)
    if maths is not None and maths.status is Status.ERROR:
        return Conclusion(Verdict.INVALID_CALL, (), _invalid(maths, cells))
    wrong = _by_kernel(cell for cell in cells if cell.wrong and cell.backend != Backend.EAGER.value)
    if wrong:
        first, *others = _worst_first(wrong, live, by_name)
        sentence = describe(wrong[first], first, batches, heads)
        if others:
            sentence += f"; {_and(others)} {'is' if len(others) == 1 else 'are'} wrong, too"
        sentence += _about_live(live, wrong, by_name, device_type)
        return Conclusion(Verdict.BACKEND_WRONG, (first, *others), sentence)
    eager = by_name.get(Backend.EAGER.value)
    if eager is not None and eager.wrong and not (undecided and eager.status is Status.ERROR):
        sentence = describe(eager, "eager (matmul, softmax, matmul)", batches, heads)
        return Conclusion(Verdict.EAGER_WRONG, (eager.backend,), sentence + _right_ones(cells))
    if cells and cells[0].dtype.startswith(NARROW) and all(cell.status is Status.DECLINED for cell in cells):
        verdict = Verdict.UNREPRODUCIBLE if live.wrong else Verdict.HEALTHY
        return Conclusion(verdict, (), _not_taken(cells[0].dtype, live, device_type))
    if live.wrong:
        return Conclusion(Verdict.UNREPRODUCIBLE, (), _clean_but_seen(live, by_name, device_type))
    if undecided:
        return Conclusion(Verdict.HEALTHY, (), f"nothing to compare: {undecided}")
    return Conclusion(Verdict.HEALTHY, (), _clean(cells, live, by_name, device_type))


def _by_kernel(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Wrong cells by the kernel that ran; a kernel's own row is preferred over the default row that chose it.

    A default row that cannot name its kernel is left out when some kernel failed for the same reason.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        known = found.get(cell.kernel)
        hung = known is not None and known.status is cell.status is Status.TIMEOUT  # the default row, in full
        if known is None or (cell.backend == cell.kernel and not hung):
            found[cell.kernel] = cell
    default = found.get(Backend.DEFAULT.value)
    if default is not None and any(
        (cell.status, cell.reason) == (default.status, default.reason) for cell in found.values() if cell is not default
    ):
        del found[Backend.DEFAULT.value]
    return found


def _worst_first(wrong: Mapping[str, Cell], live: Live, by_name: Mapping[str, Cell]) -> list[str]:
    """The kernel that ran live first, then the one that users get here, then the others in table order."""
    default = by_name.get(Backend.DEFAULT.value)
    front = [live.ran, default.kernel if default else None]
    return sorted(wrong, key=lambda name: front.index(name) if name in front else len(front))


def describe(cell: Cell, name: str, batches: int = 1, heads: int = 0) -> str:
    """What is wrong with one path, as a clause: "MATH is wrong in query row 288 of 16 heads"."""
    where = f" in {place(cell.bad, batches, heads)}" if cell.bad is not None else ""
    if cell.status is Status.NONFINITE:
        return f"{name} {cell.reason},{where}" if cell.reason == SWALLOWED else f"{name} gives NaN or Inf{where}"
    if cell.status is Status.UNSTABLE:
        return f"{name} is unstable{where}: {cell.reason}"
    if cell.status is Status.CRASHED:
        return f"{name} crashes: {cell.reason}"
    if cell.status is Status.TIMEOUT:
        return f"{name} hangs: {cell.reason}"
    if cell.status is Status.ERROR:
        return f"{name} raises {cell.reason}"
    return f"{name} is wrong{where}"


def place(bad: Bad, batches: int, heads: int) -> str:
    """Wrong rows in words: "query row 288 of 16 heads", "query rows 0-6 of head 3 in batch 1"."""
    words = f"query row{_some(bad.rows)}" if len(bad.rows) == 1 else f"query rows{_some(bad.rows)}"
    if len(ranges(bad.rows)) > LISTED_STRETCHES:
        words = f"{len(bad.rows)} query rows"
    if len(bad.heads) == 1 and heads != 1:
        words += f" of head {bad.heads[0]}"
    elif len(bad.heads) > 1:
        words += f" of {len(bad.heads)} heads" if len(bad.heads) == heads else f" of {len(bad.heads)} of {heads} heads"
    if batches > 1:
        some = len(ranges(bad.batches)) <= LISTED_STRETCHES
        words += f" in batch{_some(bad.batches)}" if some else f" in {len(bad.batches)} batches"
    return words


def short_place(bad: Bad) -> str:
    """Wrong rows for a table: "row 288, heads 0-15, worst b0 h3 row 288"."""
    words = [f"row{'s' if len(bad.rows) > 1 else ''}{_few(bad.rows)}"]
    words.append(f"head{'s' if len(bad.heads) > 1 else ''}{_few(bad.heads)}")
    if bad.batches != (0,):
        words.append(f"batch{'es' if len(bad.batches) > 1 else ''}{_few(bad.batches)}")
    if bad.count > 1:
        batch, head, row = bad.worst
        words.append(f"worst {batch},{head},{row}")
    return ", ".join(words)


def _few(indices: Sequence[int]) -> str:
    return _some(indices) if len(ranges(indices)) <= LISTED_STRETCHES else f": {len(indices)}"


def _some(indices: Sequence[int]) -> str:
    """Indices as text with a leading space: " 3", " 0-6, 9"."""
    return " " + ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges(indices))


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _about_live(live: Live, wrong: Mapping[str, Cell], by_name: Mapping[str, Cell], device_type: str) -> str:
    """How the guilty kernels relate to the one that ran when the call was captured."""
    if live.ran is None:
        return ""
    if live.ran in wrong:
        return " (the kernel that ran live)" if len(wrong) > 1 else ""
    cell = _row_of(live.ran, by_name)
    if cell is not None and cell.status is Status.AGREES:
        return f"; {live.ran}, which ran live, is right here"
    if live.device_type == device_type:
        return f"; {live.ran}, which ran live, was not judged here ({_why_not(cell)})"
    return f"; {live.ran}, which ran live, does not run here: replay on a {live.device_type} machine to judge it"


def _row_of(kernel: str | None, by_name: Mapping[str, Cell]) -> Cell | None:
    """The kernel's own row, or the default row when that took it; None when neither was asked for."""
    return by_name.get(kernel or "") or next((cell for cell in by_name.values() if cell.kernel == kernel), None)


def _why_not(cell: Cell | None) -> str:
    return "not among the backends asked for" if cell is None else cell.reason or cell.status.value


def _right_ones(cells: Iterable[Cell]) -> str:
    right = [cell.backend for cell in cells if cell.status is Status.AGREES and cell.backend != Backend.DEFAULT.value]
    return f"; {_and(right)} {'is' if len(right) == 1 else 'are'} right" if right else ""


def _invalid(maths: Cell, cells: Iterable[Cell]) -> str:
    """The call itself is at fault; a kernel that takes it anyway is worth naming."""
    kernels = (cell for cell in cells if cell.backend != Backend.EAGER.value)
    accepts = sorted({cell.kernel for cell in kernels if cell.status not in (Status.ERROR, Status.DECLINED)})
    also = f"; {_and(accepts)} accept{'s' if len(accepts) == 1 else ''} it" if accepts else ""
    return f"not a valid call: MATH rejects it ({maths.reason}){also}"


def _not_taken(dtype: str, live: Live, device_type: str) -> str:
    """No backend computes in the captured dtype on this device: nothing is known, and nobody is to blame."""
    seen = "" if not live.wrong else f"raised live ({live.raised}); " if live.raised else "wrong live; "
    where = f"replay it on the {live.device_type} machine where it ran" if live.device_type != device_type else ""
    values = "see what these values give in another dtype (replay --dtype bfloat16)"
    hint = f"{where}, or {values}" if where else values
    return f"{seen}nothing could be judged: no backend on this {device_type} takes {dtype} queries; {hint}"


def _clean_but_seen(live: Live, by_name: Mapping[str, Cell], device_type: str) -> str:
    """Seen live and clean here: on the same kernel that is a finding, elsewhere it says nothing."""
    ran = live.ran or "the kernel that ran"
    if live.planted:
        return f"wrong live with {live.planted} preloaded, clean here without: add --preload to see it again"
    absent = _absent(live, by_name, device_type)
    if absent:
        return f"{'raised' if live.raised else 'wrong'} live, clean here; {absent}"
    if live.raised:
        return f"raised live ({live.raised}), runs clean here: something that is not recorded matters"
    return (
        f"wrong live ({ran}), clean on replay: the layout was lost on the way, or the bug depends on memory "
        "around the tensors; not a sign that all is well"
    )


def _absent(live: Live, by_name: Mapping[str, Cell], device_type: str) -> str:
    """A clause when the kernel that ran live cannot or did not run here, else ""."""
    cell = _row_of(live.ran, by_name)
    if live.device_type != device_type:
        if live.ran and cell is not None and cell.status is Status.DECLINED:
            return f"{live.ran} cannot run on this {device_type}: replay it on a {live.device_type} machine"
        return f"captured on {live.device_type}, replayed on {device_type}: replay it on a {live.device_type} machine"
    if live.ran and (cell is None or cell.status in (Status.DECLINED, Status.NOT_COMPARABLE)):
        return f"{live.ran}, which ran live, was not judged here ({_why_not(cell)})"
    return ""


def _clean(cells: Iterable[Cell], live: Live, by_name: Mapping[str, Cell], device_type: str) -> str:
    ran = [cell for cell in cells if cell.status is Status.AGREES]
    names = [cell.backend for cell in ran if cell.backend != Backend.DEFAULT.value]
    default = by_name.get(Backend.DEFAULT.value)
    if default is not None and default in ran and default.kernel not in names:
        names.insert(0, default.kernel)
    if not names:
        return "nothing could be judged: no backend ran this call"
    absent = _absent(live, by_name, device_type)
    missing = [backend.value for backend in MISSING.get(device_type, ())]
    where = f"clean on this {device_type}: {_and(names)} agree with float64"
    if len(names) == 1:
        where = where.replace(" agree ", " agrees ")
    if absent:
        return f"{where}; {absent}"
    return f"{where} ({_and(missing)} not tested: not on {device_type})" if missing else where


def with_known(sentence: str, known: Sequence[Match], preloaded: Sequence[Mapping[str, str]]) -> str:
    """The sentence with the first known issue: "…; known: pytorch#191937, fixed in 2.14.0"."""
    planted = ", ".join(item["name"] for item in preloaded)
    if not known:
        return f"{sentence} (with {planted} preloaded)" if planted else sentence
    match = known[0]
    word = "possibly" if match.match == "possible" else "known:"
    emulated = f" (emulated by {planted})" if planted else ""
    fixed = f", fixed in {match.fixed_in}" if match.fixed_in else ""
    return f"{sentence}; {word} {match.issue}{emulated}{fixed}"
