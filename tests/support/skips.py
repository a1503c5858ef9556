"""What steps of CI skipped, by their JUnit files.

``python tests/support/skips.py FILE...`` counts the tests that no step ran, by cause; a test that one step skips and
another runs, as one with Triton or with more packages does, is not counted. ``python tests/support/skips.py --of CAUSE
FILE`` prints the tests of which cases were skipped for a cause, a regular expression, as ``pytest @FILE`` reads them.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).parents[2]
Case = tuple[str, str]  # the dotted name of the file, and of the test; of a file that is skipped whole, the other way


def cases(file: str) -> Iterator[tuple[Case, str | None]]:
    """Yield every case of a step, and the reason if it was skipped; one that is expected to fail ran."""
    for test in ElementTree.parse(file).iter("testcase"):
        skip, reason = test.find("skipped"), None
        if skip is not None and skip.get("message") == "collection skipped":  # a file; the reason ends its text
            reason = re.sub(r".*Skipped: (.*?)[\"']\)$", r"\1", skip.text or "", flags=re.DOTALL)
        elif skip is not None and skip.get("type") == "pytest.skip":
            reason = skip.get("message", "")
        yield (test.get("classname", ""), test.get("name", "")), reason


def causes(files: Iterable[str]) -> collections.Counter[str]:
    """Return how many tests were skipped wherever they were collected, by the reason of the first step."""
    skipped: dict[Case, str] = {}
    ran: set[Case] = set()
    for file in files:
        for case, reason in cases(file):
            if reason is None:
                ran.add(case)
            else:
                skipped.setdefault(case, reason)
    # A file that is skipped as a whole is one case, of the file's name and no class.
    whole = {("", classname) for classname, _ in ran}
    return collections.Counter(cause for case, cause in skipped.items() if case not in ran | whole)


def skipped_for(cause: str, file: str) -> list[str]:
    """List the tests, and the files, of which a step skipped cases for a cause; other packages may have other cases."""
    found: dict[str, None] = {}
    for (dotted, name), reason in cases(file):
        if reason is not None and re.search(cause, reason):
            found[f"{_path(dotted)}::{name.partition('[')[0]}" if dotted else _path(name)] = None
    return list(found)


def _path(dotted: str) -> str:
    """Return the path of a file of tests, with the classes in it, by its dotted name."""
    parts = dotted.split(".")
    files = (pathlib.Path(*parts[:depth]).with_suffix(".py") for depth in range(len(parts), 0, -1))
    file = next(path for path in files if (ROOT / path).is_file())
    return "::".join([file.as_posix(), *parts[len(file.parts) :]])


def main(given: list[str] | None = None) -> None:
    """Print the causes, the most frequent first, or the tests of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--of", metavar="CAUSE", help="a regular expression; print the tests skipped for it")
    options = parser.parse_args(given)
    if options.of:
        print("\n".join(test for file in options.files for test in skipped_for(options.of, file)))
        return
    found = causes(options.files)
    print(f"{found.total()} tests or files of tests ran in no step:")
    for cause, count in found.most_common():
        print(f"{count:6}  {cause}")


if __name__ == "__main__":
    main()
