"""Guards: the state of a module that graphs depend on, and its check at each call.

Two parts of the state are checked. A `Reading` checks tensors, modules, hooks and other objects: if one is moved or
replaced, graphs are captured again. A `ValueCheck` checks plain values (numbers, flags, texts): they are a part of a
call's key, and each set of values has graphs of its own. A place is a holder and a key in it, such as a module's
attributes and "scale". A place is "moved" once it holds another object.

guards          the tensors and objects that graphs read
reading         `Reading`: the check of tensors, modules and hooks at every call
value_check     what holds plain values, and `ValueCheck`: the check of these values at every call
links           the order in which a reading reads attributes and slots
versions        the versions of dicts, which say when to read a dict again
plain_state     the plain values that a call reads through Python, as a part of its key: reads what moved of them
set_by_break    undoes what an eager break set in a replay, so that the call can be finished eagerly
place_history   who changes which place, and so which places are guarded, and which make calls run eagerly
holders         finds the objects that hold plain values
values          keys of plain values
code_below      finds the code below a call by the names that it contains
survey          lists all tensors and modules of a module, by name
scripted        the state of TorchScript modules, which lies in C++
torch_state     settings and modes of torch around a call
functions       makes a module of a function, with the objects that it reaches
carried         tensors that runs leave in attributes for later runs
python_effects  Python state that a run changes
"""
