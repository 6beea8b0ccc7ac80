"""`sdpa-repro replay`: run dumps through every backend and say which one is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.completing import PATH, dumps
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.replaying.cells import Cell
    from sdpa_repro.replaying.replay import Replay
    from sdpa_repro.replaying.worker import Worker

DTYPES = ("captured", "bfloat16", "float16", "float32", "all")
BACKENDS = (
    "default",
    "eager",
    "MATH",
    "FLASH_ATTENTION",
    "EFFICIENT_ATTENTION",
    "CUDNN_ATTENTION",
    "OVERRIDEABLE",
)
"""As in `replaying.backends.Backend`, which cannot be imported before torch is."""

SEVERITY = (0, 2, 3, 1)
"""Exit statuses, the one that wins over all others last."""

EXPECTED = {"diverges": ("backend_wrong", "eager_wrong"), "agrees": ("healthy",)}
COLOURS = {"agrees": "green", "declined": None, "not_comparable": None}
HEADERS = ("backend", "dtype", "status", "error", "threshold", "ratio", "where", "masked rows", "runs", "reason")


@click.command(
    name="replay",
    short_help="Run dumps through every backend and say which one is wrong.",
    epilog=epilog(
        {0: "nothing wrong", 1: "a divergence, or an invalid call", 3: "wrong live but clean here"},
        "sdpa-repro replay dumps/L05-self_attn-call5-289x289.pt",
        "sdpa-repro replay --dtype captured --backend MATH --backend FLASH_ATTENTION dumps/",
        "sdpa-repro replay --expect agrees dumps/      a regression test",
    ),
)
@click.argument(
    "paths",
    metavar="DUMP|FOLDER...",
    nargs=-1,
    required=True,
    type=PATH,
    shell_complete=dumps,
)
@click.option("--device", help="Where to replay: cpu, cuda, … Default: where a wrong call was captured, or a GPU.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Dtype to replay in; repeatable. The verdict rests on the captured one.  [default: all]",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(BACKENDS, case_sensitive=False),
    help="Backend to list; repeatable.  [default: all]",
)
@click.option("--runs", default=3, show_default=True, type=click.IntRange(min=1), help="Repetitions per cell.")
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds per cell; a kernel that takes longer hangs.",
)
@click.option("--preload", multiple=True, type=PATH, help="Python file to run first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--expect",
    type=click.Choice(tuple(EXPECTED)),
    help="Exit with 0 when every dump behaves so, 1 otherwise: dumps as regression tests.",
)
def command(paths: tuple[Path, ...], as_json: bool, expect: str | None, **options: Any) -> None:
    """Run each DUMP (or every dump in a FOLDER) through every backend against a float64 reference."""
    from sdpa_repro.replaying.worker import Worker

    files = list(_files(paths))
    found: list[tuple[Path, Replay | InputError]] = []
    try:
        with Worker(options["preload"]) as worker:  # imports torch while this process does
            for path in files:
                if len(files) > 1:
                    output.progress(f"{path} ({len(found) + 1} of {len(files)})")
                found.append((path, _one(path, len(files), options, worker)))
                if not as_json and len(files) > 1:
                    _print_line(*found[-1], expect)
    except KeyboardInterrupt as stop:
        partial = getattr(stop, "partial", None)
        if partial is None or len(files) > 1:
            raise
        _print_one(partial, as_json, expect, options["preload"])
        raise SystemExit(130) from None
    if len(files) == 1:
        result = found[0][1]
        if isinstance(result, InputError):
            raise result
        _print_one(result, as_json, expect, options["preload"])
    else:
        _print_many(found, as_json, expect, options["preload"])
    raise SystemExit(_status([result for _, result in found], expect))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The dumps named, and for a folder those in it: in the order of its index.jsonl, the others by name."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = [path / name for name in _index(path / "index.jsonl")]
        dumps = [*(file for file in inside if file.is_file()), *sorted(path.glob("*.pt"))]
        if not dumps:
            raise InputError(f"{path} holds no dumps (*.pt): give a file, or capture some first")
        yield from dict.fromkeys(dumps)


def _index(path: Path) -> Iterator[str]:
    """File names in an index.jsonl; its text is not trusted, so a name never leads out of the folder."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            name = json.loads(line)["file"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(name, str) and name.endswith(".pt") and Path(name).name == name:
            yield name


def _one(path: Path, count: int, options: dict[str, Any], worker: Worker) -> Replay | InputError:
    """Replay one dump; a bad file among several is kept as its error, so that the others still run."""
    from sdpa_repro.replaying.replay import ALL_DTYPES, replay

    dtypes = options["dtypes"] or ("all",)
    try:
        return replay(
            path,
            device=options["device"],
            dtypes=ALL_DTYPES if "all" in dtypes else dtypes,
            backends=options["backends"] or None,
            runs=options["runs"],
            timeout=options["timeout"],
            worker=worker,
            progress=output.progress,
        )
    except InputError as error:
        if count == 1:
            raise
        return error


def _status(results: Sequence[Replay | InputError], expect: str | None) -> int:
    """The exit status of all: the most severe one, or whether the expectation was met."""
    statuses = []
    for result in results:
        if isinstance(result, InputError):
            statuses.append(2)
        elif expect is not None:
            statuses.append(0 if _met(result, expect) else 1)
        else:
            statuses.append(result.exit_status)
    return max(statuses, key=SEVERITY.index)


def _met(result: Replay, expect: str) -> bool:
    """Whether a dump behaves as expected: nothing agrees where no row of any backend could be compared."""
    compared = any(
        cell.dtype == result.dtype and cell.status.value == "agrees" and cell.threshold for cell in result.cells
    )
    return result.verdict.value in EXPECTED[expect] and (expect != "agrees" or compared)


def _print_one(result: Replay, as_json: bool, expect: str | None, preload: Sequence[Path]) -> None:
    if as_json:
        output.document("replay", result.document())
        return
    output.answer(output.clean(_answer(result, expect)))
    output.line()
    print_cells(result)
    output.next_command(_next(result, preload))


def print_cells(result: Replay) -> None:
    """The table, and below it what a reader must know about it; the verdict last."""
    shown = [cell for cell in result.cells if cell.dtype == result.dtype or "does not exist" not in cell.reason]
    output.table(HEADERS, [_row(cell) for cell in shown], styles=[COLOURS.get(c.status.value, "red") for c in shown])
    output.line()
    output.line(f"device: {result.device}; torch {result.environment.get('torch')}")
    output.line(output.clean(f"fidelity: {result.fidelity.sentence()}"))
    for note in result.notes:
        output.line(output.clean(f"note: {note}"))
    output.line(f"verdict: {result.verdict.value}" + (f" ({', '.join(result.guilty)})" if result.guilty else ""))


def _row(cell: Cell) -> list[str]:
    """One cell as text: empty where there is nothing to say."""
    name = f"default ({cell.chosen})" if cell.chosen else cell.backend
    stable = {True: f"{cell.runs}, same bits", False: f"{cell.runs}, bits differ", None: str(cell.runs or "")}
    where = ""
    if cell.bad is not None:
        from sdpa_repro.replaying.conclusion import short_place

        where = short_place(cell.bad)
    reason = "; ".join(filter(None, (cell.reason, cell.remark, _poisoned(cell))))
    return [
        name,
        cell.dtype,
        cell.status.value,
        _number(cell.max_abs),
        _number(cell.threshold),
        _number(cell.ratio),
        where,
        cell.fully_masked or "",
        stable[cell.bit_stable],
        output.clean(reason),
    ]


def _poisoned(cell: Cell) -> str:
    return f"rows that can see NaN in masked-out positions: {cell.poisoned}" if cell.poisoned else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _answer(result: Replay, expect: str | None) -> str:
    """The first line: the sentence, and whether it is what was expected."""
    if expect is None:
        return result.sentence
    return f"{'as expected' if _met(result, expect) else f'NOT as expected ({expect})'}: {result.sentence}"


def _next(result: Replay, preload: Sequence[Path]) -> str:
    """What to run next with this dump."""
    from sdpa_repro.cli import VERBS

    wrong = result.verdict.value in ("backend_wrong", "eager_wrong")
    if wrong and "explain" in VERBS:
        return output.shell("sdpa-repro", "explain", result.path, *_again(preload))
    return output.shell("sdpa-repro", "show", result.path)


def _again(preload: Sequence[Path]) -> list[str]:
    return [word for path in preload for word in ("--preload", str(path))]


def _print_line(path: Path, result: Replay | InputError, expect: str | None) -> None:
    """One dump among several: its name and its answer."""
    said = f"error: {result}" if isinstance(result, InputError) else _answer(result, expect)
    output.answer(output.clean(f"{path}: {said}"))


def _print_many(
    found: Sequence[tuple[Path, Replay | InputError]], as_json: bool, expect: str | None, preload: Sequence[Path]
) -> None:
    """The summary after one line per dump, or all documents in one."""
    if as_json:
        replays = [result.document() for _, result in found if not isinstance(result, InputError)]
        errors = [{"file": path.name, "error": str(error)} for path, error in found if isinstance(error, InputError)]
        output.document("replays", {"replays": replays, "errors": errors})
        return
    verdicts = [result.verdict.value if not isinstance(result, InputError) else "unreadable" for _, result in found]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    output.line(f"{len(found)} dumps: {counts}")
    worst, _ = max(found, key=lambda item: SEVERITY.index(_status([item[1]], expect)))
    output.next_command(output.shell("sdpa-repro", "replay", worst, *_again(preload)))
