"""A test of a model's invariants under padding, for the model's own repository: one file, run before it is handed over.

It builds a tiny model of the same architecture with random weights and needs torch, transformers and pytest alone.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdpa_repro.capturing import load_errors, loading, padding, synthetic, tiny
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.capturing.prefill import Prefill, of_model, padded
from sdpa_repro.errors import InputError
from sdpa_repro.locating import structure
from sdpa_repro.locating.caches import generated
from sdpa_repro.locating.lengthening import lengthened, shortest
from sdpa_repro.locating.recording import record
from sdpa_repro.locating.shrinking import FORGOTTEN, shrunk
from sdpa_repro.version import VERSION

__all__ = ["WrittenTest", "source", "tiny_prefill", "write_test"]

TEMPLATES = Path(__file__).parent / "templates"
TILE = 32
LENGTH = 58
"""Tokens of the prompt, or more when its image needs them."""
TEXT = 2
"""Tokens of text after an image that may not be missing."""
RUN = 8
"""Equal numbers in a row that are written as a product."""
GREEDY, GAP, SEEDS = 4, 0.01, 50
"""Greedy tokens; a seed is taken whose likeliest token leads by so much at each of them."""
PATIENCE = 300.0
"""Seconds for a run of the test."""


@dataclass(frozen=True)
class WrittenTest:
    """The file, and how its one run went. status: pytest's exit status, None when it was stopped for time."""

    path: Path
    status: int | None
    summary: str
    output: str
    model: str

    @property
    def exit_status(self) -> int:
        """0 when the test passes, 1 when it fails."""
        return 0 if self.status == 0 else 1

    @property
    def sentence(self) -> str:
        """What was written and how it went, in one line."""
        if self.status == 0:
            return f"{self.path} works: {self.summary}, on a tiny {self.model} with random weights"
        if self.status == 1:
            return f"{self.path} is written and fails here: {self.summary}, on a tiny {self.model} with random weights"
        return f"{self.path} is written and could not be run: {self.summary}"

    def document(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {**vars(self), "path": str(self.path), "sentence": self.sentence, "works": self.status == 0}


def write_test(
    options: PrefillOptions,
    path: Path,
    *,
    force: bool = False,
    progress: Callable[[str], None] = lambda sentence: None,
) -> WrittenTest:
    """Write a pytest file for the architecture of `options.model` (the embedded model when None) and run it once.

    Only the configuration is loaded, no weights. Raises InputError for a model whose code is not transformers' own, an
    encoder-decoder model, one that cannot be made small, an existing file without `force`, and when pytest is missing.
    """
    if path.suffix != ".py":
        raise InputError(f"{path} is no name for a test: give one like test_padding.py")
    if path.exists() and not force:
        raise InputError(f"{path} exists: give another name, or --force")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}")
    if importlib.util.find_spec("pytest") is None:
        raise InputError("pytest is not installed: pip install pytest")
    loading.transformers_version()
    name = tiny.NAME if options.model is None else loading.display_name(str(options.model))
    progress(f"building a tiny model after {name}")
    prefill, seed = tiny_prefill(options)
    text = source(prefill, seed, name)
    progress("running the test")
    status, output = _run(text, path.name)
    path.write_text(text, encoding="utf-8")
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return WrittenTest(path, status, last.strip("= "), output, type(prefill.model).__name__)


def tiny_prefill(options: PrefillOptions) -> tuple[Prefill, int]:
    """A tiny float32 model on the CPU with a prompt (an image where the family is known), and the seed of its weights.

    Raises InputError as `write_test` does.
    """
    config = tiny.configuration() if options.model is None else loading.load_config(options)
    name = tiny.NAME if options.model is None else str(options.model)
    if config.is_encoder_decoder:
        raise InputError(
            f"{loading.display_name(name)} is an encoder-decoder model, and tests are written for decoders only: "
            "leave out --write-test to check the model itself"
        )
    auto = loading.auto_class(config, name)
    try:
        small = shrunk(config)
        prefills = (_prefill(auto, small, options, seed) for seed in range(SEEDS))
        return next(((each, seed) for seed, each in enumerate(prefills) if _leads(each)))
    except InputError:
        raise
    except StopIteration:
        raise InputError("no seed gives this model a clear next token: leave out --write-test") from None
    except Exception as error:
        reason = load_errors.first_line(error)
        raise InputError(f"no small {loading.display_name(name)} could be built for a test: {reason}") from error


def source(prefill: Prefill, seed: int, title: str) -> str:
    """The text of the test for a tiny prefill."""
    import jinja2
    import transformers

    given = padded(prefill, prefill.length)
    along = padding.sequence_aligned(prefill.inputs)
    others = {name: tensor for name, tensor in prefill.inputs.items() if name not in along and name != "position_ids"}
    run = record(prefill, given)
    first = -(-(prefill.length + 1) // TILE) * TILE
    values = {
        "title": " ".join(title.split()),
        "tile": TILE,
        "version": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config_class": type(prefill.model.config).__name__,
        "model_class": type(prefill.model).__name__,
        "config": _configuration(prefill.model.config),
        "layers": structure.parent(next(iter(structure.stacks(prefill.model)[0].layers))),
        "ids": _listed(prefill.inputs["input_ids"][0].tolist()),
        "sequences": {
            name: _listed(prefill.inputs[name][0].tolist())
            for name in along
            if name not in ("input_ids", "attention_mask")
        },
        "floats": {name: tuple(each.shape) for name, each in others.items() if each.dtype.is_floating_point},
        "integers": {
            name: (_listed(each.flatten().tolist(), 4), tuple(each.shape))
            for name, each in others.items()
            if not each.dtype.is_floating_point
        },
        "positions": "position_ids" in given,
        "seen_positions": bool(run.stage("position_ids") or run.stage("rotary")),
        "block_ids": bool(run.stage("image block ids")),
        "pad": prefill.pad_token,
        "side": prefill.padding_side,
        "totals": tuple(total for total in (first - 1, first, first + 1) if total > prefill.length),
        "greedy": GREEDY if prefill.padding_side == "left" else 0,
        "seed": seed,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # Python, not HTML: values are literals or names of classes
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return re.sub(r"\n{4,}", "\n\n\n", environment.get_template("padding_test.py.j2").render(values))


def _prefill(auto: Any, config: Any, options: PrefillOptions, seed: int) -> Prefill:
    """The tiny model with the weights of a seed, and a prompt as short as its image allows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    if options.model is None:
        inputs = tiny.tiny_inputs(model, LENGTH, images=0 if options.text_only else 1)
    else:
        inputs, _ = synthetic.synthetic_inputs(config, text_only=options.text_only)
    prefill = of_model(model, inputs, padding_side=options.padding_side)
    length = max(LENGTH, shortest(prefill) + TEXT)
    return lengthened(prefill, length + (LENGTH - length) % TILE) or prefill


def _leads(prefill: Prefill) -> bool:
    """Whether the likeliest token leads clearly at each step, so that rounding cannot change the greedy output."""
    _, logits = generated(prefill, padded(prefill, prefill.length), GREEDY)
    best: Tensor = logits.topk(2).values
    return len(logits) == GREEDY and bool((best[..., 0] - best[..., 1] > GAP).all())


def _configuration(config: Any) -> str:
    """A configuration as a Python literal."""
    return _literal(config.to_diff_dict(), "")


def _literal(value: Any, indent: str) -> str:
    """Dictionaries one entry a line, without what a configuration notes about its origin; anything else in one line."""
    if not isinstance(value, Mapping):
        return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
    inner = f"{indent}    "
    kept = {name: each for name, each in value.items() if name not in FORGOTTEN}
    lines = [f"{inner}{_literal(name, inner)}: {_literal(each, inner)}," for name, each in kept.items()]
    return "\n".join(["{", *lines, f"{indent}}}"]) if lines else "{}"


def _listed(numbers: Sequence[int], depth: int = 0) -> str:
    """A list as a Python expression in lines of 100, with runs of equal numbers written as products.

    depth: spaces before the line that it stands in.
    """
    parts: list[str] = []
    plain: list[int] = []
    for number, run in itertools.groupby(numbers):
        count = len(list(run))
        if count < RUN:
            plain += [number] * count
            continue
        parts += [str(plain)] if plain else []
        plain = []
        parts.append(f"[{number}] * {count}")
    parts += [str(plain)] if plain else []
    lines = textwrap.wrap(" + ".join(parts), 92 - depth)
    margin = " " * depth
    return "\n".join(["(", *(f"{margin}    {line}" for line in lines), f"{margin})"]) if len(lines) > 1 else lines[0]


def _run(text: str, name: str) -> tuple[int | None, str]:
    """pytest's exit status (None when stopped for time) and output for the file alone in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="padding-") as folder:
        file, empty = Path(folder) / name, Path(folder) / "empty.ini"
        file.write_text(text, encoding="utf-8")
        empty.write_text("[pytest]\n", encoding="utf-8")
        words = ["-q", "-c", str(empty), "-p", "no:cacheprovider", "-W", "ignore", str(file)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"stopped after {PATIENCE:.0f} s"
        return done.returncode, (done.stdout + done.stderr).replace(f"{folder}/", "").strip()
