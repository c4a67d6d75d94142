"""`python -m attngen.syntax`: write what is made from the grammar and the functions (a table each)."""

from __future__ import annotations

from attngen import resources
from attngen.syntax import reference, table


def main() -> None:
    """Write both files, below grammar/ of the checkout."""
    root = resources.root()
    (root / table.TABLE).write_text(table.to_json(), encoding="utf-8")
    readme = root / "grammar" / "README.md"
    readme.write_text(reference.updated(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
