"""Compare the verdicts of two devices."""

from __future__ import annotations

from typing import Any

# Verdicts that cannot be compared: eager itself fails on one device, or has no result of its own there.
_NONE = ("raised", "unstable", "no sample")
# Forwards for which the devices differ, by the beginning of their names, and why.
KNOWN: dict[str, str] = {
    "tensor_split (": "a tensor of places as an argument is the host's beside a GPU, and a device's on the emulator",
    "narrow (": "a tensor of one place as an argument is the host's beside a GPU, and a device's on the emulator",
}


def differences(first: dict[str, Any], second: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """Compare two devices' findings.

    Returns:
        How many forwards both have a verdict on, those with another verdict, and those that differ from their own
        eager on either device.
    """
    mine, theirs = ({each["name"]: each for each in found["findings"]} for found in (first, second))
    both = [name for name in mine if name in theirs]
    compared = [name for name in both if not {mine[name]["verdict"], theirs[name]["verdict"]} & set(_NONE)]
    other = [
        f"{name}: {_shown(mine[name])} on {first['device']}, {_shown(theirs[name])} on {second['device']}{_why(name)}"
        for name in compared
        if mine[name]["verdict"] != theirs[name]["verdict"]
    ]
    wrong = [
        f"{name} on {found['device']}: {each['differs']}"
        for found, by_name in ((first, mine), (second, theirs))
        for name, each in by_name.items()
        if each["verdict"] == "defect"
    ]
    return len(compared), other, wrong


def summary(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Say how many verdicts differ, which, and what differs from its own eager."""
    count, other, wrong = differences(first, second)
    share = len(other) / count if count else 0.0
    lines = [f"{count} forwards compared, {len(other)} other verdicts ({share:.1%}), {len(wrong)} wrong answers"]
    return "\n".join([*lines, *other, *wrong])


def _shown(finding: dict[str, Any]) -> str:
    cause = " ".join(finding["cause"].split())[:200] or finding["reasons"] or finding["differs"]
    return f"{finding['verdict']} ({cause})" if cause else str(finding["verdict"])


def _why(name: str) -> str:
    return next((f" [known: {why}]" for begin, why in KNOWN.items() if name.startswith(begin)), "")
