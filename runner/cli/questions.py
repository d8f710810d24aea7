"""Questions to the person at the terminal."""

from __future__ import annotations

import sys

import click

from runner.errors import UsageError


def confirm(question: str) -> None:
    """Go on only after a yes. Raises Abort after a no, UsageError where nobody answers."""
    try:
        yes = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise UsageError("nobody answers: there is no terminal", "to go on without being asked, add --yes") from None
    if not yes:
        raise click.Abort
