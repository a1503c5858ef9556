"""The device protocol on `torch.cuda.CUDAGraph`, and the driver calls beside it. No policy lives here.

device     where a capture begins and ends
graph      what was captured: instantiated, replayed, dropped
allocator  whose memory an address is, and where allocations of a thread go
driver     what torch does not offer: streams of our own, what a capture holds and waits for
forks      side streams that a capture forked to and did not join
inventory  what the kernels of a graph touch
"""
