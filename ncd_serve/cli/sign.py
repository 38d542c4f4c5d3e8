"""`sign`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ncd_serve.cli.console import out
from ncd_serve.cli.options import bundle_or_newest


def sign(
    bundle: Annotated[
        Path | None,
        typer.Argument(metavar="BUNDLE|RUN", help="A bundle or an exported run; default: the newest exported run."),
    ] = None,
    key: Annotated[
        Path, typer.Option(help="Secret key of minisign; `minisign -G` makes one, with its public half.")
    ] = Path("~/.minisign/minisign.key"),
) -> None:
    """Sign a bundle and the versions that serve it; --public-key then refuses all others. Needs the extra `sign`.

    Examples:
        ncd-serve sign
        ncd-serve sign runs/birds --key release.key
    """
    from ncd_serve.triton.signed import sign_bundle

    signed, versions = sign_bundle(bundle_or_newest(bundle), key.expanduser(), password=_password)
    served = "".join(f"\nmodel:  {escape(str(folder))}" for folder in versions)
    out.print(
        f"signed: [bold]{escape(str(signed.folder))}[/bold]\ndigest: {signed.digest}{served}",
        highlight=False,
        soft_wrap=True,
    )


def _password() -> str:
    """Return the password of the key: asked on a terminal, else the first line of standard input, as minisign does."""
    if sys.stdin.isatty():
        return str(typer.prompt("Password of the key", hide_input=True, err=True))
    return sys.stdin.readline().rstrip("\n")
