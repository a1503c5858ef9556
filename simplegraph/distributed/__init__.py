"""Makes several ranks agree on what is captured, what is dropped, and how a step runs; moves no data of a model.

rendezvous  exchanges answers of all ranks, within a time limit
ranks       keeps ranks together in their captures, since their graphs hold collectives with each other
consensus   makes ranks run a step in one mode and one padded size
"""

from simplegraph.distributed.consensus import Consensus, ShapeConsensus, Vote
from simplegraph.distributed.ranks import RankGroup, SingleRank

__all__ = ["Consensus", "RankGroup", "ShapeConsensus", "SingleRank", "Vote"]
