"""Rows of the code table."""

from __future__ import annotations

from attngen.diag.row import Code

SYNTAX: tuple[Code, ...] = ()
