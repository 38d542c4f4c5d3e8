"""`python -m ncd_serve` is the `ncd-serve` command."""

from ncd_serve.cli.app import main

main()
