"""The cache of fixed addresses that decode graphs read and write. Runs no model.

store   keys, values and states in one allocation
layers  the layers of the cache, as models see them
"""
