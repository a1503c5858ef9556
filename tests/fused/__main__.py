"""Print the digests of known functions in the installed libraries: ``python -m tests.fused``.

Lines are as `simplegraph.fused.layers.digests` has them; new ones are marked. More functions can be named as arguments.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
import sys

from simplegraph.fused.layers.digests import DIGESTS
from simplegraph.fused.layers.texts import digest


def main(places: list[str]) -> None:
    """Print a line for each place of a function, below its library's version."""
    libraries = {}
    for place in dict.fromkeys([*DIGESTS.values(), *places]):
        libraries.setdefault(place.partition(".")[0], []).append(place)
    for library, listed in libraries.items():
        try:
            print(f"# {library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"# {library} is not installed")
            continue
        for place in listed:
            try:
                found = digest(pkgutil.resolve_name(place))
            except (ImportError, AttributeError) as error:
                print(f"# {place} is gone, or cannot be imported: {error}")
                continue
            known = "" if found in DIGESTS else "  # new" if found else "  # cannot be digested"
            print(f'"{found}": "{place}",{known}')


if __name__ == "__main__":
    main(sys.argv[1:])
