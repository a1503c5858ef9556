"""Guards: what graphs read of a module, and the comparison at each call that all of it is still there.

guards        the state that graphs read: what moved is captured again
reading       compares in every call what a module holds with what it held
links         the order in which a comparison reads attributes and slots
versions      the versions of dicts, which say when to look at what a dict holds
plain_state   the plain values that a call reads through Python, as a part of its key
holders       what holds such values, and how it is found
values        keys of plain values
code_below    finds the code below a call by the names that it has
survey        lists everything that a module holds, by name
torch_state   settings and modes of torch around a call
functions     makes a module of a function, from what it reaches
left          tensors that runs leave in attributes: outputs, and inputs where a run reads them
effects       what a run changes in Python
"""
