"""Fused operators: Triton kernels that are ready in a second, torch's operators where they cannot run. No graphs.

choice            chooses the operators for a device, after a trial of each
torch_operators   the operators by torch: the reference
triton_operators  the operators by Triton's kernels
row_kernels       kernels over rows: norms, gated activations
one_row_kernels   kernels for one row: a linear layer, attention of one query
cache_kernels     kernels before attention: rotary embedding, writes to a cache
image_kernels     kernels of images in channels_last
launches          launches that begin while the kernel before still runs
first_use         loads CUDA's libraries before their first use
watched_steps     tells those who keep computed values that weights were written
layers            finds layers of models, and makes their fused forwards
optimizing        `optimize`: rewrites a module in place
"""
