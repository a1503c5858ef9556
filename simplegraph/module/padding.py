"""Refuses padding for calls whose answer it changes."""

from __future__ import annotations

import logging

from simplegraph.graph.scalars import NumbersSeen
from simplegraph.manager.table import ProgramTable
from simplegraph.module.call import Binding
from simplegraph.reasons import CannotBind, Reason

logger = logging.getLogger("simplegraph")

_NUMBER_REMEDY = (
    "A replay of a padded batch would use the number of the padded size. Add the sizes of your batches to "
    "capture_sizes, or pass the number as a tensor. If it changed for another reason, name it in state_key."
)


def refuse_padding(
    binding: Binding, table: ProgramTable, text: str, said: str, remedy: str, *, warn: bool = True
) -> None:
    """Let padded calls of a signature run eagerly from now on, and `warn` of it.

    Args:
        binding: of the signature.
        table: of its graphs.
        text: what padding does.
        said: how that was found.
        remedy: what to do.
        warn: False if the caller raises.
    """
    binding.refuse_padding(CannotBind(Reason.PADDING_SHOWS, said))
    texts = table.stats.name, text, said, "Padded batches of such calls now run eagerly.", remedy
    if warn:
        logger.warning("simplegraph: %s: %s: %s.\n  %s %s\n  See %s", *texts, Reason.PADDING_SHOWS.link)


def learn_numbers(binding: Binding, table: ProgramTable, seen: NumbersSeen) -> str | None:
    """Learn what numbers a run passed to operators; where one follows the batch size, refuse padding and say so."""
    said = binding.numbers.learn(seen)
    if said is not None and binding.unsliceable is None and table.config.padding:
        refuse_padding(binding, table, "padding changes the answer", said, _NUMBER_REMEDY)
    return said
