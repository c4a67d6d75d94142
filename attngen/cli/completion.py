"""`attngen completion`: the completion script of a shell, on stdout."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum
from typing import Annotated

import typer

from attngen.cli import files


class Shell(StrEnum):
    """Shells that can complete attngen's words."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.", show_default=False)]) -> None:
    """Print a completion script.

    bash: attngen completion bash > ~/.local/share/bash-completion/completions/attngen
    zsh: attngen completion zsh > a folder of $fpath, named _attngen.
    fish: attngen completion fish > ~/.config/fish/completions/attngen.fish
    """
    # The parser prints its own script when started with this variable; that keeps script and parser in step.
    environment = {**os.environ, "_ATTNGEN_COMPLETE": f"source_{shell.value}"}
    made = subprocess.run(
        [sys.executable, "-m", "attngen"], env=environment, capture_output=True, text=True, check=False
    )
    if made.returncode or not made.stdout.strip():
        raise RuntimeError(f"no completion script for {shell.value}: {made.stderr.strip()[:500]}")
    files.write_text("-", made.stdout)
