"""Guards: the state of a module that graphs read, and its comparison at each call.

guards        the state that graphs read; if it moves, graphs are captured again
reading       compares a module's present state with its earlier state at every call
links         the order in which a comparison reads attributes and slots
versions      the versions of dicts, which say when to read a dict again
plain_state   the plain values that a call reads through Python, as a part of its key
holders       finds the objects that hold such values
values        keys of plain values
code_below    finds the code below a call by the names that it contains
survey        lists all tensors and modules of a module, by name
scripted      the state of TorchScript modules, which lies in C++
torch_state   settings and modes of torch around a call
functions     makes a module of a function, from the objects that it reaches
carried       tensors that runs carry over in attributes: outputs, and inputs if a run reads them
effects       Python state that a run changes
"""
