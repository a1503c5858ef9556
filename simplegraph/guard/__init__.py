"""Guards: what graphs read of a module, and the comparison at each call that all of it is still there.

guards        the state that graphs read, and how it is compared: what moved is captured again
versions      the versions of dicts, which say when to look at what a dict holds
survey        lists everything that a module holds, by name
torch_state   settings and modes of torch around a call
functions     makes a module of a function, from what it reaches
effects       what a run changes in Python
"""
