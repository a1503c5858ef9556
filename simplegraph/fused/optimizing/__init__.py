"""Rewrites an inference module in place: folded norms, channels_last weights. Lists and undoes that.

optimize  `optimize`, and its handle
pairs     pairs of a layer and a norm that are folded
folded    folded weights, computed again when those change
forwards  the forwards that use them
blocks    blocks of convolutions
layout    how weights lie in memory
examples  runs on example inputs, compared with float64
"""
