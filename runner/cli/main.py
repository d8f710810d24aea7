"""The front door: finds the command, catches every error, and leaves with the right exit code.

Commands live in modules that are imported only when they run, so that ``cloudrun --help`` is instant.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from runner import __version__
from runner.errors import CloudrunError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# name -> (module, what it does). One row per command; the function in the module has the command's name.
COMMANDS = {
    "submit": ("runner.cli.run", "Run a job here until it is done, or this machine is."),
    "validate": ("runner.cli.spec", "Check a job spec and what it needs."),
    "status": ("runner.cli.look", "Show where a job stands and what is at risk."),
    "logs": ("runner.cli.look", "Show what the trainer printed."),
    "checkpoints": ("runner.cli.checkpoints", "List, verify, pull or remove stored checkpoints."),
    "stop": ("runner.cli.run", "Ask a running job to save, upload and leave."),
    "sync": ("runner.cli.data", "Bring a job's data into the cache, nothing else."),
    "cache": ("runner.cli.data", "List or clear the local data cache."),
    "schema": ("runner.cli.spec", "Print the JSON Schema of the job spec."),
    "init": ("runner.cli.spec", "Write a job.yaml for the script that is here."),
}

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class ReaderGone(Exception):
    """Who read our output has left (``| head``): the rest is not wanted."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Click ends with 1 when it meets a closed pipe: it must not meet one."""
    try:
        yield
    except BrokenPipeError as gone:
        raise ReaderGone from gone


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with reader_may_leave():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl([(name, does) for name, (_, does) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings=HELP,
    epilog="Example: cloudrun init && cloudrun submit job.yaml",
)
@click.version_option(__version__, prog_name="cloudrun")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cloudrun(debug: bool) -> None:
    """Run a training command on machines that can vanish, and finish it anyway."""


def complain(message: str, hint: str = "") -> None:
    """Print an error as every command does: what is wrong, then what to do."""
    with suppress(BrokenPipeError):
        click.echo(f"error: {message}", err=True)
        if hint:
            click.echo(f"hint: {hint}", err=True)


def told(error: Exception) -> tuple[str, str]:
    """An error that nobody foresaw: what is wrong, and what to do."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        hint = "may this user write there, and is there room? HOME, XDG_STATE_HOME and cache.dir say where things go"
        return f"{where}{error.strerror or error}", hint
    return f"{type(error).__name__}: {error}", "this is a fault of cloudrun; run again with --debug for the details"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cloudrun.main(arguments, prog_name="cloudrun", standalone_mode=False)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "cloudrun"
        complain(error.format_message(), f"see: {where} --help")
        code = ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    except CloudrunError as error:
        if "--debug" in arguments:
            raise
        complain(error.message, error.hint)
        code = error.exit_code
    except ReaderGone:
        # Python writes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.SUCCEEDED
    except Exception as error:
        if "--debug" in arguments:
            raise
        complain(*told(error))
        code = ExitCode.TRAINER_FAILED
    sys.exit(int(code or 0))
