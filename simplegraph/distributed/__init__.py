"""Lets several ranks decide alike what is captured, what is dropped, and how a step runs; moves no data of a model.

rendezvous  every rank's word on a question, within a bound
ranks       ranks that capture together, since their graphs hold collectives with each other
consensus   ranks that run a step in one mode and one padded size
"""

from simplegraph.distributed.consensus import Consensus, ShapeConsensus, Vote
from simplegraph.distributed.ranks import RankGroup, SingleRank

__all__ = ["Consensus", "RankGroup", "ShapeConsensus", "SingleRank", "Vote"]
