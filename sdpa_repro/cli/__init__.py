"""The command line: one file a verb, imported only when the verb is used.

Everything that can go wrong ends in one line on stderr and one of these exit statuses: 0 nothing wrong
found, 1 a divergence found, 2 bad usage or input, 3 seen live but not reproducible, 70 a bug in
sdpa-repro itself, 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from sdpa_repro.cli.epilog import epilog
from sdpa_repro.cli.output import PROGRAM, be_quiet, clean
from sdpa_repro.errors import INTERRUPTED, InputError
from sdpa_repro.version import VERSION

BAD_INPUT, INTERNAL = 2, 70
COMPLETION = "_SDPA_REPRO_COMPLETE"
"""Set by click's shell completion, which `main` leaves to click."""
TRACEBACK = "SDPA_REPRO_TRACEBACK"

_REFUSALS = """
ENOSPC EDQUOT EFBIG EACCES EPERM EROFS EIO ENAMETOOLONG ELOOP EMFILE ENFILE ENOMEM EAGAIN
"""
REFUSALS = frozenset(getattr(errno, name, errno.ENOSPC) for name in _REFUSALS.split())
"""What an operating system answers when it is the disk, the rights or the memory, and no bug."""

NO_TEMPORARY = "No usable temporary directory"
"""How `tempfile` begins when it finds no folder to write to."""

VERBS = {
    "capture": "Run a model or a script and dump the attention calls that go wrong.",
    "show": "Describe a dump: tensors, layout, mask, where it came from.",
    "replay": "Run a dump through every backend and say which one is wrong.",
    "explain": "Say which conditions a failure needs, for which lengths, and what was computed instead.",
    "sweep": "Try a dump's call at many lengths, head_dims, dtypes and layouts: which fail.",
    "reduce": "Shrink a failing call to the smallest one that still fails.",
    "issue": "Write a script and an issue text that are ready to post.",
    "versions": "Run a script or a dump under other releases of torch: one table.",
    "report": "Write one HTML page about dumps: verdict, pictures, cause, script.",
    "share": "Make a dump that strangers may have.",
    "guard": "Run a script and change the attention calls that would meet a known bug.",
    "locate": "Say at which stage a padded and an unpadded run of a prompt part.",
    "verify": "Check what has to hold for a prompt however it is padded and batched.",
    "diagnose": "Capture, replay, explain, reduce, and write issue and report in one go.",
    "known": "List the known upstream bugs, or try them on this machine.",
}
"""Verb (a module `cli/<verb>.py` that defines `command`) and its line in the help."""

LIKE = 0.7
"""How like a verb a mistyped word has to be (`difflib`'s ratio) to be taken for it."""

EPILOG = epilog(
    {0: "nothing wrong found", 1: "a divergence found", 3: "seen live, not reproducible"},
    "sdpa-repro diagnose                      the embedded tiny model, end to end",
    "sdpa-repro capture --model ID --pad 7    one prefill of a model",
    "sdpa-repro capture -- script.py ARGS     any script, unchanged",
    "sdpa-repro replay dumps/x.pt             every backend against float64",
)

REQUIREMENTS = {
    "torch": "'torch>=2.5'",
    "transformers": "'transformers>=5.13'",
    "numpy": "'numpy>=1.26'",
    "rich": "'rich>=13'",
    "accelerate": "accelerate",
    "PIL": "pillow",
    "torchvision": "torchvision",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
    "matplotlib": "matplotlib",
}
"""What to install when a module is missing."""


QUIET = click.Option(
    ["-q", "--quiet"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=be_quiet,
    help="Print the answer alone: no table, no progress, no next command.",
)
"""Of the program and of every verb: `sdpa-repro -q show x.pt` and `sdpa-repro show -q x.pt` do the same."""


class Verbs(click.Group):
    """A group whose commands are imported on use, so that `--help` needs neither torch nor transformers."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which they are used."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `cli/<verb>.py` and return its `command`; None for a verb that does not exist."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"sdpa_repro.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"sdpa_repro.cli.{cmd_name}.command is not a click command")
        if QUIET.name not in [parameter.name for parameter in command.params]:
            command.params.append(QUIET)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments. A verb that does not exist is a usage error that names those like it."""
        name = args[0]
        if name in VERBS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        like = [verb for verb in VERBS if verb.startswith(name)] or difflib.get_close_matches(name, VERBS, 1, LIKE)
        meant = f" Did you mean {like[0]!r}?" if like else ""
        raise click.UsageError(f"No such command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table above instead of importing each for its help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    params=[QUIET],
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name=PROGRAM)
@click.pass_context
def group(ctx: click.Context) -> None:
    """Turn a wrong prefill into a verdict on scaled_dot_product_attention.

    Captures the attention calls of a model with their exact memory layout, and replays each through
    every backend against a float64 reference.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(BAD_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never raises, never prints a traceback unasked.

    Not `group.main()`: that turns Ctrl-C and a closed pipe into statuses of its own.
    """
    sys.stdout = sys.stdout or io.StringIO()  # `>&-`: started without one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a file name may hold what the terminal's encoding lacks
    try:
        if COMPLETION in os.environ:
            group.main(prog_name=PROGRAM)
        with group.make_context(PROGRAM, list(sys.argv[1:] if arguments is None else arguments)) as context:
            status = group.invoke(context)
        sys.stdout.flush()
    except SystemExit as stop:
        return _status(stop.code)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as wrong:
        return _fail(f"{wrong.format_message()} {_hint(wrong)}".strip(), BAD_INPUT)
    except InputError as wrong:
        return _fail(str(wrong), BAD_INPUT)
    except (KeyboardInterrupt, click.Abort) as stop:
        return _fail("interrupted" + (f"; {stop}" if str(stop) else ""), INTERRUPTED)
    except BrokenPipeError:
        return _closed_pipe()
    except ModuleNotFoundError as missing:
        return _missing(missing)
    except Exception as bug:
        return _internal(bug)
    return _status(status)


def _status(code: object) -> int:
    """An exit status from what SystemExit carries or a command returns: None is 0, a text is an error."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    return _fail(str(code), 1) if isinstance(code, str) else 0


def _fail(text: str, status: int) -> int:
    """One line on stderr, unless nobody can read it."""
    with suppress(OSError):
        click.echo(f"error: {clean(text)}", err=True)
    return status


def _hint(wrong: click.ClickException) -> str:
    """Where to read on after a usage error."""
    context = wrong.ctx if isinstance(wrong, click.UsageError) else None
    return f"Try '{context.command_path} --help'." if context is not None else ""


def _missing(missing: ModuleNotFoundError) -> int:
    """A dependency that is not installed is the user's to install; a missing module of ours is a bug."""
    name = (missing.name or "").partition(".")[0]
    if name not in REQUIREMENTS:
        return _internal(missing)
    return _fail(f"{name} is not installed; install it with: pip install {REQUIREMENTS[name]}", BAD_INPUT)


def _closed_pipe() -> int:
    """The reader went away (`| head`): stop silently, as a program killed by SIGPIPE would."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + getattr(signal, "SIGPIPE", 13)


def _internal(bug: BaseException) -> int:
    """Anything unforeseen: a bug in this program, unless the operating system refused something."""
    if isinstance(bug, OSError) and (bug.errno in REFUSALS or NO_TEMPORARY in str(bug)):
        mend = "set TMPDIR to a folder with room" if NO_TEMPORARY in str(bug) else "while something was written"
        return _fail(f"{bug.strerror}: {bug.filename or mend}", BAD_INPUT)
    if isinstance(bug, MemoryError):
        return _fail("not enough memory: free some, or take a smaller call", BAD_INPUT)
    if os.environ.get(TRACEBACK):
        traceback.print_exception(bug)
    kind = type(bug).__name__
    return _fail(
        f"this is a bug in sdpa-repro: {kind}: {clean(str(bug))[:200]} (set {TRACEBACK}=1 to see the traceback)",
        INTERNAL,
    )
