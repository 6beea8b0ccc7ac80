"""`sdpa-repro capture`: run a model or a script, check its attention calls live, dump those that matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sdpa_repro.cli import output
from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.model_options import build_options, given, model_options
from sdpa_repro.errors import InputError

if TYPE_CHECKING:
    from sdpa_repro.capturing.records import Options
    from sdpa_repro.capturing.report import Report

LISTED, OTHERS = 40, 5
"""Most calls in the table; with more calls than that, those wrong or kept, and so many of the worst others."""

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
HEADERS = ("call", "module", "query", "key", "head stride", "kernel", "error / threshold", "kept")
SELECTION = (
    click.option("--call", type=click.IntRange(min=0), metavar="N", help="Only call N, dumped whatever comes of it."),
    click.option("--module", metavar="PATTERN", help="Only calls of modules whose path contains or matches PATTERN."),
    click.option("--phase", type=click.Choice(["prefill", "decode", "all"]), default="all", show_default=True),
    click.option(
        "--keep",
        type=click.Choice(["worst", "diverging", "all"]),
        default="diverging",
        show_default=True,
        help="What to dump; 'diverging' keeps the worst healthy call when none diverges.",
    ),
    click.option("--stop-at-first", is_flag=True, help="Stop the run at the first wrong call."),
    click.option("--max-dumps", type=click.IntRange(min=1), help="Most dumps.  [default: 8; none with --keep all]"),
    click.option("--max-bytes", default="2GiB", show_default=True, metavar="SIZE", help="Room for all dumps together."),
    click.option("--no-check", is_flag=True, help="Do not judge calls live; dump the first ones."),
)


def selection_options(command: Any) -> Any:
    """Add the options that say which calls are looked at and dumped; see `build_selection`."""
    for option in reversed(SELECTION):
        command = option(command)
    return command


class ScriptCommand(click.Command):
    """A verb that takes a script after `--`: with nothing there it runs nothing, rather than its default model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which forgets about the `--`. Raises InputError for one that ends the command line."""
        ended = args[-1:] == ["--"]
        rest = super().parse_args(ctx, args)
        if ended and not ctx.resilient_parsing and not ctx.params["words"] and "--" not in ctx.params.values():
            raise InputError("nothing to run after --: give a script, or -m and a module")
        return rest


@click.command(
    name="capture",
    cls=ScriptCommand,
    short_help="Run a model or a script and dump the attention calls that go wrong.",
    epilog=epilog(
        {0: "nothing wrong; or of a script its own status", 1: "a wrong call", 2: "bad usage, or no call seen"},
        "sdpa-repro capture                              the embedded tiny model",
        "sdpa-repro capture --model ID --image cat.png   one prefill of a model",
        "sdpa-repro capture -- script.py ARGS            a script, unchanged, with its child processes",
    ),
)
@click.argument("words", metavar="[-- SCRIPT.py ARGS... | -- -m MODULE ARGS...]", nargs=-1, type=click.UNPROCESSED)
@model_options
@click.option(
    "--out", "-o", default="dumps", show_default=True, type=click.Path(path_type=Path), help="Folder for dumps."
)
@selection_options
@click.option("--preload", multiple=True, type=click.Path(path_type=Path), help="Python file to run first; repeatable.")
@click.option("--no-prove", is_flag=True, help="Do not replay each dump once to prove it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; a script's stdout goes to stderr.")
def command(words: tuple[str, ...], **values: Any) -> None:
    """Run a model, or any script, and dump the calls of scaled_dot_product_attention that go wrong.

    Every call is checked live against a reference. A script ends with its own status when that is not 0.
    """
    report = run_capture(words, values)
    if values["as_json"]:
        output.document("capture", report)
    else:
        print_report(report, values["preload"], words)
    from sdpa_repro.capturing.report import exit_status

    raise SystemExit(exit_status(report))


def run_capture(
    words: Sequence[str],
    values: Mapping[str, Any],
    *,
    unpadded: bool = False,
    progress: Callable[[str], None] = output.progress,
) -> Report:
    """Capture as the options say: a script when there are words, else a model (`unpadded`: also without padding).

    values: the parameters of `model_options` and `selection_options`, and `out`, `preload`, `no_prove`,
    `as_json`; of another verb `command`, which the dumps name as their origin (see `command_line`). Under torchrun
    rank 0 returns the report of all ranks, and the others end here. Raises InputError for bad usage and when no call
    was seen.
    """
    from sdpa_repro import ranks
    from sdpa_repro.capturing import folder, report, together

    options = build_selection(values)
    out = values["out"]
    before = [entry["file"] for entry in folder.entries(out)]
    with ranks.gentle_stop():
        found = _capture(words, values, options, unpadded, progress)
        if ranks.world() > 1:
            found = together.of_ranks(found, out, options, before)
    if not ranks.is_first():
        raise SystemExit(report.exit_status(found) if found["failed"] else 0)
    for problem in found["problems"]:
        output.warn(output.clean(problem))
    found["sentence"] = report.answer(found)
    if not values.get("no_prove") and not report.was_interrupted(found) and not found.get("failed"):
        try:
            report.prove(found, list(values["preload"]), progress)
        except KeyboardInterrupt:  # what was captured is kept, and told
            found["interrupted"] = True
            found["sentence"] = report.answer(found)
    return found


def _capture(
    words: Sequence[str],
    values: Mapping[str, Any],
    options: Options,
    unpadded: bool,
    progress: Callable[[str], None],
) -> Report:
    """Run the script or the model and report what this process, or those it started, saw."""
    from sdpa_repro import ranks

    preload, out = list(values["preload"]), values["out"]
    if words:
        clash = given(**values)
        if clash:
            raise InputError(
                f"--{clash[0].rstrip('_').replace('_', '-')} does not go with a script: leave out one of them"
            )
        return _script(words, out, options, values)
    from sdpa_repro.capturing.model_run import capture_model

    chosen = build_options(**{name: values.get(name) for name in values if name in _model_names()})
    if chosen.tp_plan and options.stop_at_first:
        raise InputError(
            "--stop-at-first does not go with --tp-plan: a rank that stops leaves the others waiting for it"
        )
    say = progress if ranks.is_first() else lambda text: None
    origin = {"command": values.get("command") or command_line(values)}
    return capture_model(chosen, out, options, preload=preload, origin=origin, progress=say, unpadded=unpadded)


def _script(words: Sequence[str], out: Path, options: Options, values: Mapping[str, Any]) -> Report:
    """Run the script and merge what its processes reported."""
    import sys

    from sdpa_repro.capturing import report
    from sdpa_repro.capturing.script import run_script
    from sdpa_repro.environment import preload_records, software

    origin = {"command": (values.get("command") or command_line(values)) + " -- …"}
    stdout = sys.stderr.fileno() if values["as_json"] else None
    run = run_script(words, out, options, preload=values["preload"], origin=origin, stdout=stdout)
    found = report.of_script(run, out, options, preload_records(values["preload"]))
    found["environment"] = software()
    return found


def build_selection(values: Mapping[str, Any]) -> Options:
    """The selection as `capturing.records.Options`. Raises InputError for a size that is none."""
    from sdpa_repro.capturing.records import Options

    return Options(
        call=values["call"],
        module=values["module"],
        phase=values["phase"],
        keep=values["keep"],
        stop_at_first=values["stop_at_first"],
        max_dumps=values["max_dumps"],
        max_bytes=parse_size(values["max_bytes"]),
        check=not values["no_check"],
    )


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500 MB", "1.5g" or "4096". Raises InputError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise InputError(f"--max-bytes {text!r} is no size: write 2GiB, 500MB or a number of bytes")
    return size


def command_line(values: Mapping[str, Any], verb: str = "capture", out: str = "dumps") -> str:
    """The verb and the names of the options that were given; no values, since those may name files or prompts.

    out: the verb's default of `--out`.
    """
    defaults = {"phase": "all", "keep": "diverging", "max_bytes": "2GiB", "out": Path(out)}
    flags = []
    for name, value in values.items():
        if value in (None, False, (), "") or defaults.get(name) == value:
            continue
        flags.append("--" + {"as_json": "json", "images": "image"}.get(name, name.rstrip("_").replace("_", "-")))
    return " ".join(["sdpa-repro", verb, *flags])


def print_report(report: Report, preload: Sequence[Path] = (), words: Sequence[str] = ()) -> None:
    """The answer, the table of calls, the dumps with their proof, and the next command."""
    script = report["script"]
    output.answer(output.clean(report["sentence"]))
    for line in script_lines(script) if script is not None else []:
        output.line(output.clean(line))
    if report["calls"]:
        output.line()
        rows, colours = call_rows(report)
        output.table(_headers(report), rows, styles=colours)
        hidden = report["checked"] - len(rows)
        if hidden > 0:
            wrong = report["wrong"] - colours.count("red")
            output.line(f"… and {hidden} more calls, {wrong or 'none'} of them wrong")
        output.line()
    for line in remarks(report):
        output.line(output.clean(line))
    _print_dumps(report)
    if report["dumps"]:
        output.line(
            "note: the key and value tensors in a dump reveal the model's input; share it only if that may be known"
        )
    output.next_command(next_command(report, preload, words))


def next_command(report: Report, preload: Sequence[Path], words: Sequence[str]) -> str:
    """What to run next: the replay of the worst dump; after a crash inside a call, a run that dumps its inputs."""
    again = [word for each in preload for word in ("--preload", each)]
    if report["dumps"]:
        path = Path(report["out"]) / report["dumps"][0]["file"]
        return output.shell("sdpa-repro", "replay", path, *again)
    inside = (report["script"] or {}).get("inside")
    if inside:
        out = ["--out", report["out"]]
        return output.shell("sdpa-repro", "capture", "--call", inside[0].split()[1], *out, *again, "--", *words)
    return output.shell("sdpa-repro", "capture", "--help")


def call_rows(report: Report) -> tuple[list[list[str]], list[str | None]]:
    """The table's rows, and a colour for each: all calls when they are few, else those worth a look."""
    calls = report["calls"]
    if len(calls) > LISTED:
        order = sorted(range(len(calls)), key=lambda at: _weight(calls[at]), reverse=True)
        notable = sum(_weight(call)[:2] != (False, False) for call in calls)
        calls = [calls[at] for at in sorted(order[: min(LISTED, notable + OTHERS)])]
    many = _many_processes(report)
    rows = [[*([str(_process(call))] if many else []), *_row(call)] for call in calls]
    colours = {"diverges": "red", "nonfinite": "red", "raised": "yellow", "unchecked": "yellow"}
    return rows, [colours.get(call["status"]) for call in calls]


def _weight(call: Mapping[str, Any]) -> tuple[bool, bool, float]:
    wrong = call["status"] not in ("agrees", "unchecked")
    return call["kept"] is not None, wrong, call["ratio"] if call["ratio"] == call["ratio"] else -1.0


def _row(call: Mapping[str, Any]) -> list[str]:
    shape = "x".join(map(str, call["query"]))
    key = "x".join(map(str, call["key"]))
    if tuple(call["value"]) != tuple(call["key"]):
        key += " / " + "x".join(map(str, call["value"]))
    strides = {call["key_head_stride"], call["value_head_stride"]}
    stride = (
        str(call["key_head_stride"])
        if len(strides) == 1
        else f"{call['key_head_stride']} / {call['value_head_stride']}"
    )
    ratio = {"raised": "raised", "unchecked": "not checked"}.get(call["status"], f"{call['ratio']:.3g}")
    return [str(call["index"]), call["module"], shape, key, stride, call["kernel"], ratio, call["kept"] or call["note"]]


def _headers(report: Report) -> tuple[str, ...]:
    return ("process", *HEADERS) if _many_processes(report) else HEADERS


def _many_processes(report: Report) -> bool:
    return len({call["process"] for call in report["calls"]}) > 1


def _process(call: Mapping[str, Any]) -> str:
    return f"rank {call['rank']}" if call["rank"] is not None else str(call["process"])


def script_lines(script: Mapping[str, Any]) -> list[str]:
    """How the script ended, and which of its processes were not seen."""
    lines = _end_lines(script)
    lines += [f"recorder: {error}" for error in script["failed"]]
    if script["without_report"]:
        lines.append(
            f"{script['without_report']} process(es) ended without a last report (os._exit, exec, or killed): "
            "their last calls may be missing here, and a healthy call is not dumped"
        )
    lines += [
        f"a process ended inside {call}: add --call {call.split()[1]} to dump its inputs" for call in script["inside"]
    ]
    return lines + [f"not recorded: {each}" for each in script["not_recorded"]]


def _end_lines(script: Mapping[str, Any]) -> list[str]:
    """That the script failed; after Ctrl-C how it ended, where not by that."""
    from sdpa_repro.capturing.report import stopped_by_user

    if not script["status"] or stopped_by_user(script["status"], script["interrupted"]):
        return []
    return [f"the script {'ended' if script['interrupted'] else 'itself failed'}: {script['end']}"]


def remarks(report: Report) -> list[str]:
    """Calls that could not be looked at, and calls made elsewhere."""
    lines = ["stopped at the first wrong call"] if report["stopped"] else []
    lines += [f"passed through: {count} x {reason}" for reason, count in report["passed"].items()]
    lines += [f"not recorded: {count} calls in thread {name!r}" for name, count in report["elsewhere"].items()]
    lines += [f"not seen: {hint}" for hint in report["hints"] if "torch.compile" in hint]
    unchecked = [call for call in report["calls"] if call["status"] == "unchecked"]
    reasons = sorted({call["reason"] for call in unchecked})
    if unchecked:
        lines.append(f"{len(unchecked)} calls not checked: {'; '.join(reasons[:3])}")
    return lines


def _print_dumps(report: Report) -> None:
    """One line a dump: what it is and whether it is proven."""
    for each in report["dumps"]:
        path = Path(report["out"]) / each["file"]
        kind = {"agrees": "healthy", "diverges": "wrong", "nonfinite": "wrong"}.get(each["status"], each["status"])
        output.line(output.clean(f"{path}: {kind}{_proof(each)}"))


def _proof(dump: Mapping[str, Any]) -> str:
    found = dump.get("fidelity")
    if found is None:
        return ""
    if found["bit_equal"] and found["layout_equal"]:
        return ", proven: same layout, output bit for bit"
    what = "LAYOUT LOST" if found["layout_equal"] is False else "not proven"
    return f", {what}: {found['reason']}"


def _model_names() -> tuple[str, ...]:
    from sdpa_repro.cli.model_options import NAMES

    return NAMES
