"""The device protocol on `torch.cuda.CUDAGraph`, with the driver calls that torch does not offer. No policy is here.

device     begins and ends captures
graph      captured graphs: instantiation, replay, end
allocator  the owner of the memory at an address, and the pool of a thread's allocations
driver     driver calls: separate streams, and the operations that a capture contains and waits for
forks      finds side streams that a capture forked to and did not join
inventory  the memory that the kernels of a graph touch
"""
