"""Public names that are imported at their first use. The package's stub file lists them once, with their homes."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(package: str, file: str, needs: str = "") -> tuple[list[str], Callable[[str], Any]]:
    """The ``__all__`` and the ``__getattr__`` of a package.

    Args:
        package: its name.
        file: its ``__init__.py``; the stub beside it has lines such as ``from package.home import Name as Name``.
        needs: the optional package on which the names depend, which is also the name of the extra.
    """
    imports = [
        node for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    homes = {alias.name: node.module for node in imports for alias in node.names if alias.asname == alias.name}

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if not needs or str(error.name).partition(".")[0] != needs:
                raise
            from simplegraph.base.errors import ConfigError, install_command

            raise ConfigError(f"{package}.{name} needs {needs}: {install_command(needs)}") from error
        setattr(sys.modules[package], name, value)
        return value

    return sorted(homes), load
