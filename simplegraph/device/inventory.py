"""The memory that a captured graph touches, as the driver tells it: addresses, and whose they are."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple


class MemoryKind(enum.Enum):
    """Whose memory an address is in."""

    POOL = "memory of the graph's own pool"
    KNOWN = "memory that the graph's owner keeps alive"
    WORKSPACE = "a library's workspace"
    FOREIGN = "live memory that nobody accounts for"
    OUTSIDE = "device memory that torch did not allocate"
    FREED = "memory that was given back"


class KnownMemory(NamedTuple):
    """Memory that somebody keeps alive: where it begins and ends, and its name."""

    start: int
    end: int
    name: str


class Touch(NamedTuple):
    """An address that a node of a graph has.

    Attributes:
        node: the kernel's name, or what else it does.
        address: the address; offset: from the start of the block, or of the known memory, that it is in.
        place: whose memory that is; name: its name, if it is known.
        certain: False if the address is a word of a struct, which may be padding that holds anything.
        parameter: which of the kernel's has the address; -1 if the node is no kernel.
        number: the node's place among the nodes.
    """

    node: str
    address: int
    offset: int
    place: MemoryKind
    name: str
    certain: bool
    parameter: int = -1
    number: int = 0


@dataclasses.dataclass
class Inventory:
    """The addresses in the nodes of one captured graph.

    Attributes:
        nodes: how many nodes there are.
        touches: what they touch, in their order.
        notes: what could not be read, and how often.
        seconds: the time that reading took.
    """

    nodes: int = 0
    touches: list[Touch] = dataclasses.field(default_factory=list)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0

    def certain(self, place: MemoryKind) -> list[Touch]:
        """List the addresses in this place that are no padding."""
        return [touch for touch in self.touches if touch.place is place and touch.certain]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        touches = [{**touch._asdict(), "place": touch.place.name.lower()} for touch in self.touches]
        return {"nodes": self.nodes, "touches": touches, "notes": dict(self.notes), "seconds": self.seconds}
