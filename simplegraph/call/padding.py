"""Refuses padding for calls whose answer it changes."""

from __future__ import annotations

import logging

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import Binding
from simplegraph.manager.table import ProgramTable
from simplegraph.program.scalars import NumbersSeen

logger = logging.getLogger("simplegraph")


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
    """Learn what of a run follows the batch size unseen; refuse padding where something does, and say so."""
    found = binding.numbers.learn(seen)
    if found is not None and binding.unsliceable is None and table.config.padding:
        refuse_padding(binding, table, "padding changes the answer", found.said, found.remedy)
    return None if found is None else found.said
