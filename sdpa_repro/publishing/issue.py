"""The issue: the two fields of PyTorch's form, filled with what was measured and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.attention import AttentionCall, is_rule, viewed_once
from sdpa_repro.errors import InputError
from sdpa_repro.mask import describe
from sdpa_repro.publishing import scope, wording
from sdpa_repro.publishing.escaping import block, code, mapping, one_line, prose, texts
from sdpa_repro.publishing.length_facts import adopted
from sdpa_repro.publishing.limit import errors_in
from sdpa_repro.publishing.running import ScriptRun
from sdpa_repro.publishing.script import odd_rows
from sdpa_repro.publishing.story import Story
from sdpa_repro.publishing.versions import columns, markdown, table
from sdpa_repro.replaying.reference import reference
from sdpa_repro.switches import dtype_name

PRELOADED_BEFORE = "before the runs below"
"""In the banner about preloaded files: they ran here, too, and not only at capture."""

TEMPLATE = Path(__file__).parent / "templates" / "issue.md.j2"


@dataclass(frozen=True)
class Report:
    """Everything that an issue is written from.

    call: the one in `script`. explanation, reduction, replay: documents of these verbs, `replay` of the same call;
    any may be empty. origin, environment, captured_with: of the dump, untrusted. preloaded: files that ran first.
    versions: results from other releases (`torch`, `results` by backend). machine: what `collect_env` says. command:
    what writes this issue again. inline, stored: arguments whose values are not in closed form. result: what `call`
    gave when it failed. captured, captured_explanation, captured_replay: the call that was reduced to `call`, and the
    documents about it.
    """

    call: AttentionCall
    story: Story
    script: str
    run: ScriptRun | None = None
    explanation: Mapping[str, Any] = field(default_factory=dict)
    reduction: Mapping[str, Any] = field(default_factory=dict)
    replay: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    captured_with: Sequence[Mapping[str, str]] = ()
    preloaded: Sequence[Mapping[str, str]] = ()
    versions: Sequence[Mapping[str, Any]] = ()
    machine: str = ""
    command: str = ""
    inline: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    result: Tensor | None = None
    captured: AttentionCall | None = None
    captured_explanation: Mapping[str, Any] = field(default_factory=dict)
    captured_replay: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adopted(self) -> str:
        """The captured call's length rule, where it is stated for want of one of `call`."""
        return adopted(self.explanation, self.captured_explanation, self.call) if self.captured is not None else ""

    @property
    def emulated(self) -> bool:
        """Whether anything ran before torch's own kernels, here or at capture."""
        return bool(self.preloaded or self.captured_with)

    @property
    def title(self) -> str:
        """Plain text for the form's title."""
        return wording.title(self.story, self.story.cause, self.story.needs, emulated=self.emulated)


def issue(report: Report, template: str | Path | None = None) -> str:
    """The issue as Markdown, by PyTorch's form or by a Jinja `template` of one's own that uses the same `fields`.

    Raises InputError, in one line, for a template that cannot be read, is malformed, or names an unknown field.
    """
    return render(fields(report), template)


def check_template(template: str | Path | None) -> None:
    """Raise InputError for a template that cannot be read or is malformed, before any work is done for it."""
    if template is not None:
        _compiled(Path(template))


def render(values: Mapping[str, Any], template: str | Path | None = None) -> str:
    """Fill a template. The values are Markdown already; braces in them are text and never run."""
    import jinja2

    path = Path(template) if template is not None else TEMPLATE
    compiled = _compiled(path)
    try:
        return str(compiled.render(dict(values))).rstrip() + "\n"
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise InputError(f"the template {path} does not work: {one_line(error)}; mend it or leave it out") from error


def _compiled(path: Path) -> Any:
    """A template that may only read what it is given: templates are passed around, too."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        autoescape=False, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"cannot read the template {path}: {reason}; give a text file") from error
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the template {path} is malformed in line {error.lineno}: {one_line(error)}") from error


def fields(report: Report) -> dict[str, Any]:
    """What a template may use: Markdown texts and lists of them, empty where there is nothing to say."""
    story, run = report.story, report.run
    versions = table(run, report.versions)
    return {
        "title": prose(report.title),
        "labels": [code(label) for label in wording.labels(story)],
        "known": wording.known_note(report.explanation.get("known") or report.replay.get("known") or ()),
        "preloaded": _preloaded(report),
        "backend": story.backend,
        "device": story.device,
        "cause": prose(story.cause),
        "rows": _rows(report),
        "lengths_more": _lengths(report)[1],
        "why": why(report),
        "inputs": inputs(report.call, report.replay, story),
        "note": _note(report),
        "script": block(report.script, "python"),
        "output": block(run.shown) if run else "",
        "how": f"{prose(run.where)}; {run.seconds:.0f} s; {prose(run.ending())}" if run else "",
        "expected": _expected(report),
        "versions": versions,
        "backends": columns(versions),
        "versions_table": markdown(versions),
        "workarounds": wording.workarounds(
            report.explanation,
            lambda line: scope.workaround_note(
                line, report.captured_explanation, reduced=report.captured is not None or bool(report.reduction)
            ),
        ),
        "found_in": found_in(report.origin, report.environment, report.captured),
        "command": code(report.command),
        "made_with": f"Written by {code(report.command)} from a captured call." if report.command else "",
        "assistance": (
            "To be completed before posting: which parts AI tools wrote or ran, what you ran and checked yourself, "
            "and that you answer for this report." + _asked_for(report)
        ),
        "machine": block(report.machine)
        if report.machine
        else "To be filled in: the output of `python -m torch.utils.collect_env`.",
    }


def _rows(report: Report) -> list[tuple[str, str]]:
    """The table of conditions: what is needed and what is not, which lengths, what comes out, where."""
    explained, cell = report.explanation, guilty_cell(report.replay, report.story)
    found = [
        ("needed", _listed(_needed(report)) or _none_needed(explained)),
        ("also fails", _listed(wording.also_fails(explained, report.reduction))),
        ("not tested", _listed(wording.not_tested(explained))),
        ("lengths tried", _lengths(report)[0]),
        ("what it computes", wording.computes(explained)),
        ("wrong rows", wording.wrong_rows(cell, report.call.query.shape[-2], report.call.query.shape[-3])),
        ("wrong rows of the captured call", _captured_rows(report)),
    ]
    return [(name, text) for name, text in found if text]


def _needed(report: Report) -> list[str]:
    """The conditions; the rule says for which of the two calls it holds."""
    words = wording.needed(report.explanation, report.call, report.reduction, report.adopted)
    note = scope.rule_note(report.call, report.explanation, report.captured, report.captured_explanation)
    return [*words[:-1], words[-1] + note] if note else words


def _lengths(report: Report) -> tuple[str, list[str]]:
    return scope.lengths(report.explanation, report.captured_explanation, report.captured, report.adopted)


def _captured_rows(report: Report) -> str:
    """Which rows of the captured call are wrong: the reduced one keeps as few as it can."""
    if report.captured is None or report.captured.query.dim() < 3:
        return ""
    cell = guilty_cell(report.captured_replay or mapping(report.captured_explanation.get("replay")), report.story)
    return wording.wrong_rows(cell, report.captured.query.shape[-2], report.captured.query.shape[-3], others=False)


def _asked_for(report: Report) -> str:
    """What maintainers ask for that takes a run of its own."""
    story = report.story
    outside = mapping(report.explanation.get("poison")).get("reads_outside") is True
    wanted = []
    if story.backend == "CUDNN_ATTENTION":
        log = "CUDNN_LOGLEVEL_DBG=3 CUDNN_LOGDEST_DBG=be.log CUDNN_FRONTEND_LOG_INFO=1 python repro.py"
        wanted.append(f"the log of {code(log)}")
    if story.device == "cuda" and (story.ends_process or outside):
        wanted.append(f"what {code('compute-sanitizer python repro.py')} prints")
    return f" Attach {' and '.join(wanted)}." if wanted else ""


def _none_needed(explained: Mapping[str, Any]) -> str:
    """That each thing that was changed left the failure as it was; "" where nothing was tried."""
    return "nothing that was tried" if texts(explained.get("not_needed")) else ""


def _listed(words: Sequence[str]) -> str:
    return " · ".join(prose(word) for word in words)


def guilty_cell(replay: Mapping[str, Any], story: Story) -> Mapping[str, Any]:
    """The replay table's cell of the story's backend in the captured dtype; empty when there is none."""
    cells = [mapping(cell) for cell in replay.get("cells") or ()]
    mine = [cell for cell in cells if cell.get("backend") == story.backend]
    return next((cell for cell in mine if cell.get("dtype") in (replay.get("dtype"), "captured")), {})


def why(report: Report) -> str:
    """Why one result is wrong and the other right."""
    story = report.story
    if story.ends_process:
        right = [name for name, word in _words(report.run).items() if word == "ok" and name != "default"]
        text = "The arguments are valid" + (f", and {_and(right)} computes them" if len(right) == 1 else "")
        text += f", and {_and(right)} compute them" if len(right) > 1 else ""
        verb = "must not end the process" if story.status == "crashed" else "must return"
        return f"{text}; whatever the values, a kernel {verb}."
    text = (
        "In the script, `expected` is the definition written out in float64 from the same tensors, "
        "without any call of `scaled_dot_product_attention`."
    )
    errors = errors_in(report.run.output) if report.run else {}
    wrong = errors.get(story.backend)
    others = {name: error for name, error in errors.items() if name not in ("default", story.backend)}
    close = {name: error for name, error in others.items() if _within(error, story.limit)}
    if close:
        most = max(close.values())
        agree = "agrees" if len(close) == 1 else "agree"
        text += f" {_and(list(close))} {agree} with it (largest error {most:.3g})"
    failed = "raises an error" if story.status == "error" else "" if wrong is None else _off(wrong, report)
    text += f"{';' if close else ''} {story.backend} {failed}" if failed else ""
    text += "." if close or failed else ""
    worst = scope.worst_element(report.call, report.result, wrong)
    return text + (f" The worst of its output is {worst}." if worst else "")


def _off(error: float, report: Report) -> str:
    if _within(error, report.story.limit):
        return f"was right in this run (largest error {error:.3g})"
    if math.isfinite(error):
        return f"is off by {error:.3g}"
    there = odd_rows(report.call, reference(report.call))
    return "has NaN or infinity in other places" if there else "gives NaN or infinity there"


def _within(error: float, limit: float | None) -> bool:
    return limit is not None and error <= limit


def _words(run: ScriptRun | None) -> Mapping[str, str]:
    rows = table(run, ())
    return dict(rows[0]["results"]) if rows else {}


def inputs(call: AttentionCall, replay: Mapping[str, Any], story: Story) -> str:
    """What triage asks: mask, fully masked rows, extreme values, whether it happens every time."""
    said = [_about_mask(call), _about_values(call)]
    cell = guilty_cell(replay, story)
    runs, stable = cell.get("runs"), cell.get("bit_stable")
    if isinstance(runs, int) and runs > 1 and stable is not None:
        same = "gives the same bits every time" if stable else "gives different bits from run to run"
        said.append(f"In {runs} runs it {same}.")
    return " ".join(filter(None, said))


def _about_mask(call: AttentionCall) -> str:
    mask = call.attn_mask
    headline = prose(describe(call).headline)
    kind = f" ({dtype_name(mask.dtype)})" if mask is not None and not is_rule(mask) else ""
    live = reference(call).live
    hidden = int((~live.flatten(0, -2).any(0)).sum()) if live.dim() > 1 else 0
    some = int((~live.flatten(0, -2).all(0)).sum()) if live.dim() > 1 else 0
    if mask is None:
        return f"Mask: {headline}."
    if not some:
        return f"Mask: {headline}{kind}; no row is fully masked."
    rows = f"{some} of {live.shape[-1]} query rows are fully masked"
    rows += "" if hidden == some else " in some batch or head"
    return f"Mask: {headline}{kind}; {rows} and left out of the comparison."


def _about_values(call: AttentionCall) -> str:
    """The largest magnitudes, and whether anything is not finite."""
    largest, odd = [], []
    for name, tensor in call.tensors.items():
        if name == "attn_mask":
            continue
        once = viewed_once(tensor.detach())
        finite = once[once.isfinite()]
        largest.append(f"{float(finite.abs().max()):.3g} in {name}" if finite.numel() else f"none in {name}")
        if not bool(once.isfinite().all()):
            odd.append(name)
    extreme = f"{_and(odd)} holds NaN or infinity" if odd else "nothing is NaN or infinite"
    return f"Largest magnitudes: {', '.join(largest)}; {extreme}."


def _note(report: Report) -> str:
    """Why values are not in closed form, when they are not."""
    names = report.stored or report.inline
    if not names:
        return ""
    why = "No closed form of {} was found with which it still fails" if report.story.searched else "{} as captured"
    how = "the script holds the values as integers."
    if report.stored:
        how = f"the script reads the values from {code(report.story.file)} with `weights_only=True`."
    return f"{why.format(_and(names))}: {how}"


def _expected(report: Report) -> str:
    story = report.story
    if story.ends_process:
        return "every backend returns, or declines with a reason."
    reason = f" ({prose(story.limit_reason)})" if story.limit_reason else ""
    limit = f"at most {story.limit:.3g}{reason}" if story.limit is not None else "rounding"
    if story.status == "error":
        return f"{story.backend} returns, or declines before it begins; other backends take this call."
    dtype = story.autocast or dtype_name(report.call.query.dtype)
    return f"every backend within {dtype} rounding of float64; here {limit}."


def _preloaded(report: Report) -> str:
    """That something ran before torch's own kernels: a planted fault must never pass for a real one."""
    if not report.emulated:
        return ""
    files = {
        str(item.get("name")): str(item.get("sha256", ""))[:12] for item in (*report.captured_with, *report.preloaded)
    }
    listed = ", ".join(f"{code(name, longest=60)} (sha256 {code(digest)})" for name, digest in files.items())
    when = PRELOADED_BEFORE if report.preloaded else "when the call was captured"
    return (
        f"Not a finding about PyTorch alone: {listed} was loaded {when}. If that file plants a fault, this report "
        "shows the planted fault: do not post it."
    )


def found_in(origin: Mapping[str, Any], environment: Mapping[str, Any], captured: AttentionCall | None = None) -> str:
    """Where the call came from: phase, model, module, padding; the machine, where that is another one; its layout."""
    words = []
    phase = origin.get("phase") if origin.get("phase") in ("prefill", "decode") else None
    model = _model(origin.get("model"))
    made_up = str(origin.get("model")).startswith("none:")
    if (model or phase) and not made_up:
        words.append(f"Found in {f'the {phase} of ' if phase else ''}{model or 'a model'}")
        module = code(origin.get("module") or "", longest=100)
        words.append(f"module {module}" if module else "")
        padding = origin.get("padding")
        padding = padding.get("tokens") if isinstance(padding, Mapping) else padding
        words.append(f"{padding} tokens of padding" if type(padding) is int and padding > 0 else "")
    text = ", ".join(filter(None, words))
    recorded, gpu = environment.get("torch"), environment.get("gpu")
    if recorded and recorded != torch.__version__:
        text += f"{'; c' if text else 'C'}aptured with torch {code(recorded, longest=40)}"
        text += f" on {code(gpu, longest=60)}" if gpu else ""
    text += "." if text else ""
    if captured is not None:
        text += f"{' ' if text else ''}The captured call: {scope.layout(captured)}."
    return text


def _model(name: Any) -> str:
    """A model's name as code; of a local folder the last part alone."""
    if not isinstance(name, str) or not name.strip():
        return ""
    local = name.startswith(("/", "~", ".", "\\")) or name[1:3] == ":\\"
    return code(name.replace("\\", "/").rstrip("/").rpartition("/")[2] if local else name, longest=80)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
