"""The language: text to AttentionSpec and back. See grammar/README.md for the language itself."""

from attngen.syntax.api import check_text, load_all, load_spec
from attngen.syntax.fmt import format_text
from attngen.syntax.make import make_spec
from attngen.syntax.printer import print_expr, print_spec

__all__ = ["check_text", "format_text", "load_all", "load_spec", "make_spec", "print_expr", "print_spec"]
