"""Makes several ranks agree on what is captured, what is dropped, and how a step runs; moves no data of a model.

ranks  what is asked of ranks, and the answers of a single one
group  several ranks: exchanges answers within a time limit, keeps captures together, agrees on a step's shape
"""
