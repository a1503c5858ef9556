"""Splits a graph's shape in two micro-batches, for two-batch overlap."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from simplegraph.batch.descriptor import BatchDescriptor


class MicroBatch(NamedTuple):
    """A part of a graph's rows.

    Attributes:
        rows: of the whole batch.
        descriptor: its shape.
    """

    rows: slice
    descriptor: BatchDescriptor


def micro_batches(descriptor: BatchDescriptor) -> tuple[MicroBatch, MicroBatch] | None:
    """Split a shape in two nearly equal parts; None if it has a single row, or a single request of uniform decode.

    Requests of uniform decode stay whole. The rows of other batches are cut in the middle, wherever that is in a
    request: its later tokens belong to the second part.
    """
    unit = descriptor.uniform_query_len or 1
    count = descriptor.num_tokens // unit
    if count < 2:
        return None
    first = (count + 1) // 2 * unit
    bounds = itertools.pairwise((0, first, descriptor.num_tokens))
    one, other = (MicroBatch(slice(*bound), _part(descriptor, bound[1] - bound[0])) for bound in bounds)
    return one, other


def _part(descriptor: BatchDescriptor, num_tokens: int) -> BatchDescriptor:
    most = num_tokens // (descriptor.uniform_query_len or 1)
    num_reqs = None if descriptor.num_reqs is None else min(most, descriptor.num_reqs)
    return dataclasses.replace(descriptor, num_tokens=num_tokens, num_reqs=num_reqs)
