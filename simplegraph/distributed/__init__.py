"""Makes several ranks agree on captures, on dropped graphs, and on the mode and size of steps; moves no model data.

ranks  `SingleRank`, the questions that ranks ask each other, with the answers of a single rank
group  several ranks: `RankGroup` keeps captures together, `ShapeConsensus` agrees on a step's shape
"""
