"""Count the tests that no step of CI ran, by cause: ``python tests/support/skips.py FILE...``, JUnit files of steps.

A test that one step skips and another runs, as one with Triton or with more packages does, is not counted.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable
from xml.etree import ElementTree


def causes(files: Iterable[str]) -> collections.Counter[str]:
    """Return how many tests were skipped wherever they were collected, by the reason of the first step."""
    skipped: dict[tuple[str, str], str] = {}
    ran: set[tuple[str, str]] = set()
    for file in files:
        for test in ElementTree.parse(file).iter("testcase"):
            key = test.get("classname", ""), test.get("name", "")
            skip = test.find("skipped")
            if skip is None or skip.get("type") != "pytest.skip":  # else it is expected to fail, and ran
                ran.add(key)
            else:
                skipped.setdefault(key, skip.get("message", ""))
    # A file that is skipped as a whole is one case, of the file's name and no class.
    whole = {("", classname) for classname, _ in ran}
    return collections.Counter(cause for key, cause in skipped.items() if key not in ran | whole)


def main(files: list[str]) -> None:
    """Print the causes, the most frequent first."""
    found = causes(files)
    print(f"{found.total()} tests or files of tests ran in no step:")
    for cause, count in found.most_common():
        print(f"{count:6}  {cause}")


if __name__ == "__main__":
    main(sys.argv[1:])
