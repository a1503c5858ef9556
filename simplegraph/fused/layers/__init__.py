"""Finds layers of models by examples or their class, and makes forwards of fused operators. Changes no model.

layer        a recognized layer
kinds        the kinds of layers
recognition  proves a fused forward by examples
provable     finds functions that examples can prove
norms        norms, and the sums before them
linears      gated linear layers, and those of one row
rotary       rotary embeddings
images       blocks of convolutions
denoisers    layers of diffusers' transformers
"""
