"""Places of Python state, the kinds of values that lie there, and the ways to change them, as source text.

In a text `$` stands for the number of a place, `@` for the object that has it (``self`` in code, ``m`` in changes), OWN
for that object's class, VALUE for what a place holds at first, NEW for what it is given, V for what is read, AT for the
place itself, and `this` for the file's globals.
"""

from __future__ import annotations

import dataclasses

# ruff: noqa: E501  the text of a piece is one line where the program's is

# What all programs can name; each twin has classes of its own.
CLASSES = '''\
import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import math
import operator
import pathlib
import types

import numpy as np
import torch
from torch import nn

W = 6


class Box:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


class Calling(Box):
    def __call__(self):
        return self.value


class Getting:
    def __init__(self, value):
        self._held = {"k": value}

    def __getitem__(self, key):
        return self._held[key]


class Standing:
    """Stands for another object."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class HalfSlotted(Slotted):
    """Has slots and a dict."""


class DotDict(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Items(list):
    pass


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    name: str = "a"


@dataclasses.dataclass
class Outer:
    inner: Config


@dataclasses.dataclass(slots=True)
class Slim:
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


class Kept(nn.Module):
    """A module that no attribute of another names as a submodule."""

    def __init__(self, value):
        super().__init__()
        self.value = value


Pair = collections.namedtuple("Pair", "value other")


class Mode(enum.Enum):
    SLOW = 2
    FAST = 3
    OFF = 5


class Size(enum.IntEnum):
    SMALL = 2
    LARGE = 4


class Opt(enum.Flag):
    X = 1
    Y = 2
    Z = 4


def closing(v):
    def read():
        return v

    return read


def by_default(value):
    def read(v=value):
        return v

    return read


def by_keyword(value):
    def read(*, v=value):
        return v

    return read


def same(v, other=None):
    return v


def double(h):
    return h * 2


def halve(h):
    return h * 0.5


def scaled(h, by=1.0):
    return h * by
'''


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where a value lies.

    Attributes:
        read: an expression of the code; at: the same in changes, that of `read` with the owner if it is empty.
        setup: lines of the owner's ``__init__``; body: of its class; file: of the file, before classes.
        put: what gives it another value, in changes; ``AT = NEW`` if it is empty.
        inside: the same in code, from which effects are made; none if it is "none".
        drop: what deletes it, where `read` does with none.
        more: changes that leave its value as it is.
        without: kinds of values that it cannot hold; hashable: True if it holds nothing else.
        is_eager: True where no graph serves some kinds of values.
    """

    read: str
    setup: str = ""
    body: str = ""
    file: str = ""
    at: str = ""
    put: str = ""
    inside: str = ""
    drop: str = ""
    more: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    hashable: bool = False
    is_eager: bool = False


_CALLED = frozenset({"function", "table of functions"})
_MODULES = frozenset({"submodule"})
_OPENED = frozenset({"submodule", "object"})  # what lies in an object that is a key of a dict is not looked at

SPOTS = {
    "attribute": Spot("self.p$", "self.p$ = VALUE", more=("@.p$ = @.p$", "@.unread$ = 1", "@.unread$ = 'a'")),
    "attribute that may be there": Spot("getattr(self, 'p$', VALUE)", "self.p$ = VALUE", at="getattr(@, 'p$', 'none')", put="@.p$ = NEW", inside="self.p$ = NEW", drop="vars(@).pop('p$', None)", without=_MODULES),
    "attribute that is there later": Spot("(self.p$ if hasattr(self, 'p$') else VALUE)", at="getattr(@, 'p$', 'none')", put="@.p$ = NEW", inside="none", drop="vars(@).pop('p$', None)", without=_MODULES),
    "attribute by a computed name": Spot("getattr(self, 'p' + str(self.index$))", "self.index$ = $; self.p$ = VALUE", at="@.p$", inside="self.p$ = NEW"),
    "attribute by its getter": Spot("operator.attrgetter('p$')(self)", "self.p$ = VALUE", at="@.p$", inside="self.p$ = NEW"),
    "attribute in vars": Spot("vars(self)['p$']", "self.p$ = VALUE", at="@.p$", inside="self.p$ = NEW", without=_MODULES),
    "attribute by one name of several": Spot("[getattr(self, name) for name in ('o$', 'p$')][1]", "self.o$ = self.p$ = VALUE", at="@.p$", inside="self.p$ = NEW"),
    "property": Spot("self.prop$", "self._p$ = VALUE", "@property\ndef prop$(self):\n    return self._p$", at="@._p$", inside="self._p$ = NEW"),
    "property of a dict": Spot("self.prop$", "self.conf$ = {'p': VALUE}", "@property\ndef prop$(self):\n    return self.conf$.get('p')", at="@.conf$['p']", inside="self.conf$['p'] = NEW"),
    "submodule's attribute": Spot("self.sub$.p", "self.sub$ = nn.Tanh(); self.sub$.p = VALUE"),
    "listed submodule's attribute": Spot("self.sub$[0].p", "self.sub$ = nn.ModuleList([nn.Tanh()]); self.sub$[0].p = VALUE"),
    "hidden module's attribute": Spot("self.hidden$[0].value", "self.hidden$ = [Kept(VALUE)]"),
    "object": Spot("self.o$.value", "self.o$ = Box(VALUE)", more=("@.o$ = @.o$", "@.o$.unread = 1", "vars(@.o$)['value'] = vars(@.o$)['value']")),
    "object by its method": Spot("self.o$.get()", "self.o$ = Box(VALUE)", at="@.o$.value", inside="self.o$.value = NEW"),
    "object that is another": Spot("self.o$.value", "self.o$ = Box(VALUE)", put="@.o$ = Box(NEW)"),
    "object with another dict": Spot("self.o$.value", "self.o$ = Box(VALUE)", put="@.o$.__dict__ = {'value': NEW}"),
    "object by a computed name": Spot("getattr(self.o$, 'val' + 'ue')", "self.o$ = Box(VALUE)", at="@.o$.value", inside="self.o$.value = NEW"),
    "bound method": Spot("self.bound$()", "self.bound$ = Box(VALUE).get", at="@.bound$.__self__.value", inside="none"),
    "bound method of another": Spot("self.bound$()", "self.bound$ = Box(VALUE).get", at="@.bound$.__self__.value", put="@.bound$ = Box(NEW).get", inside="none"),
    "callable object": Spot("self.calling$()", "self.calling$ = Calling(VALUE)", at="@.calling$.value", inside="self.calling$.value = NEW"),
    "object with items": Spot("self.getting$['k']", "self.getting$ = Getting(VALUE)", at="@.getting$._held['k']", inside="self.getting$._held['k'] = NEW"),
    "object behind another": Spot("self.standing$.value", "self.standing$ = Standing(Box(VALUE))", at="@.standing$.inner.value", inside="self.standing$.inner.value = NEW"),
    "slot": Spot("self.o$.value", "self.o$ = Slotted(VALUE)"),
    "slot beside a dict": Spot("self.o$.value", "self.o$ = HalfSlotted(VALUE)", more=("@.o$.unread = 1",)),
    "namespace": Spot("self.o$.value", "self.o$ = types.SimpleNamespace(value=VALUE)"),
    "arguments of a program": Spot("self.o$.value", "self.o$ = argparse.Namespace(value=VALUE)"),
    "dataclass": Spot("self.o$.scale", "self.o$ = Config(VALUE)"),
    "dataclass that is another": Spot("self.o$.scale", "self.o$ = Config(VALUE)", put="@.o$ = dataclasses.replace(@.o$, scale=NEW)"),
    "dataclass in one": Spot("self.o$.inner.scale", "self.o$ = Outer(Config(VALUE))"),
    "dataclass with slots": Spot("self.o$.scale", "self.o$ = Slim(VALUE)"),
    "frozen dataclass": Spot("self.o$.scale", "self.o$ = Frozen(VALUE)", put="@.o$ = Frozen(NEW)", inside="self.o$ = Frozen(NEW)"),
    "frozen dataclass by force": Spot("self.o$.scale", "self.o$ = Frozen(VALUE)", put="object.__setattr__(@.o$, 'scale', NEW)", inside="none"),
    "namedtuple": Spot("self.t$.value", "self.t$ = Pair(VALUE, 1)", put="@.t$ = @.t$._replace(value=NEW)", inside="self.t$ = self.t$._replace(value=NEW)"),
    "dict": Spot("self.d$['k']", "self.d$ = {'k': VALUE}", more=("@.d$ = dict(@.d$)", "@.d$['k'] = @.d$.pop('k')", "@.d$.update(@.d$)")),
    "dict's get": Spot("self.d$.get('k', VALUE)", "self.d$ = {}", at="@.d$.get('k', 'none')", put="@.d$['k'] = NEW", inside="self.d$['k'] = NEW", drop="@.d$.pop('k', None)"),
    "dict that is another": Spot("self.d$['k']", "self.d$ = {'k': VALUE}", put="@.d$ = {'k': NEW}"),
    "dict filled again": Spot("self.d$['k']", "self.d$ = {'k': VALUE}", put="@.d$.clear(); @.d$.update(k=NEW)", inside="none"),
    "dict's only item": Spot("next(iter(self.d$.values()))", "self.d$ = {'k': VALUE}", at="@.d$['k']", inside="self.d$['k'] = NEW"),
    "dict by a computed key": Spot("self.d$['k' + str(len(self.d$))]", "self.d$ = {'k2': VALUE, 'a': 1}", at="@.d$['k2']", inside="self.d$['k2'] = NEW"),
    "dict by a number": Spot("self.d$[3]", "self.d$ = {3: VALUE, 4: 1}"),
    "dict's key": Spot("next(iter(self.d$))", "self.d$ = {VALUE: 1}", put="@.d$ = {NEW: 1}", hashable=True, without=_OPENED),
    "dict's key in place": Spot("next(iter(self.d$))", "self.d$ = {VALUE: 1}", put="@.d$.clear(); @.d$[NEW] = 1", inside="none", hashable=True, without=_OPENED),
    "dotdict": Spot("self.d$.p", "self.d$ = DotDict(p=VALUE)", drop="@.d$.pop('q', None)"),
    "dict with a default": Spot("self.d$['k']", "self.d$ = collections.defaultdict(int, k=VALUE)"),
    "ordered dict": Spot("self.d$['k']", "self.d$ = collections.OrderedDict(k=VALUE)"),
    "user's dict": Spot("self.d$['k']", "self.d$ = collections.UserDict(k=VALUE)"),
    "chain of dicts": Spot("self.d$['k']", "self.d$ = collections.ChainMap({}, {'k': VALUE})", at="@.d$.maps[1]['k']", inside="none"),
    "list": Spot("self.l$[0]", "self.l$ = [VALUE, 1]", more=("@.l$ = list(@.l$)", "@.l$.append(@.l$.pop())", "@.l$.append(1)", "del @.l$[2:]")),
    "list's last item": Spot("self.l$[-1]", "self.l$ = [1, VALUE]", put="@.l$.pop(); @.l$.append(NEW)", inside="self.l$[-1] = NEW"),
    "list by a loop": Spot("[v for v in self.l$][0]", "self.l$ = [VALUE]", at="@.l$[0]", inside="self.l$[0] = NEW"),
    "list that is another": Spot("self.l$[0]", "self.l$ = [VALUE]", put="@.l$ = [NEW]"),
    "list by a slice": Spot("self.l$[0]", "self.l$ = [VALUE]", put="@.l$[:] = [NEW]"),
    "list of a class": Spot("self.l$[0]", "self.l$ = Items([VALUE])"),
    "user's list": Spot("self.l$[0]", "self.l$ = collections.UserList([VALUE])"),
    "deque": Spot("self.l$[0]", "self.l$ = collections.deque([VALUE, 1])", more=("@.l$.rotate(2)",)),
    "tuple": Spot("self.t$[0]", "self.t$ = (VALUE, 1)", put="@.t$ = (NEW, 1)", inside="self.t$ = (NEW, 1)"),
    "set": Spot("next(iter(self.s$))", "self.s$ = {VALUE}", put="@.s$ = {NEW}", hashable=True),
    "set in place": Spot("next(iter(self.s$))", "self.s$ = {VALUE}", put="@.s$.clear(); @.s$.add(NEW)", inside="none", hashable=True),
    "frozen set": Spot("next(iter(self.s$))", "self.s$ = frozenset([VALUE])", put="@.s$ = frozenset([NEW])", hashable=True),
    "list in a dict": Spot("self.n$['a'][0]", "self.n$ = {'a': [VALUE]}"),
    "dict in a list": Spot("self.n$[0]['a']", "self.n$ = [{'a': VALUE}]"),
    "dict in a dict": Spot("self.n$['a']['b']", "self.n$ = {'a': {'b': VALUE}}"),
    "list in a list": Spot("self.n$[0][0]", "self.n$ = [[VALUE]]"),
    "tuple in a dict": Spot("self.n$['a'][0]", "self.n$ = {'a': (VALUE,)}", put="@.n$['a'] = (NEW,)", inside="self.n$['a'] = (NEW,)"),
    "tuple in a tuple": Spot("self.n$[0][0]", "self.n$ = ((VALUE,),)", put="@.n$ = ((NEW,),)", inside="self.n$ = ((NEW,),)"),
    "list in a tuple": Spot("self.n$[0][0]", "self.n$ = ([VALUE],)"),
    "object in a tuple": Spot("self.n$[0].value", "self.n$ = (Box(VALUE),)"),
    "object in a list": Spot("self.n$[0].value", "self.n$ = [Box(VALUE)]"),
    "object in a dict": Spot("self.n$['a'].value", "self.n$ = {'a': Box(VALUE)}"),
    "object in an object": Spot("self.n$.value.value", "self.n$ = Box(Box(VALUE))"),
    "dict in an object": Spot("self.n$.value['a']", "self.n$ = Box({'a': VALUE})"),
    "slot in a list": Spot("self.n$[0].value", "self.n$ = [Slotted(VALUE)]"),
    "list in a slot": Spot("self.n$.value[0]", "self.n$ = Slotted([VALUE])"),
    "dict in a dataclass": Spot("self.n$.scale['a']", "self.n$ = Frozen({'a': VALUE})"),
    "list in a namedtuple": Spot("self.n$.value[0]", "self.n$ = Pair([VALUE], 1)"),
    "dict in a dict of a dict": Spot("self.n$['a']['b']['c']", "self.n$ = {'a': {'b': {'c': VALUE}}}"),
    "class attribute": Spot("self.c$", body="c$ = VALUE", at="this.OWN.c$", inside="OWN.c$ = NEW", without=_CALLED),
    "class attribute by the class": Spot("OWN.c$", body="c$ = VALUE", at="this.OWN.c$", inside="OWN.c$ = NEW"),
    "class attribute by its type": Spot("type(self).c$", body="c$ = VALUE", at="this.OWN.c$", inside="none"),
    "class attribute behind an own one": Spot("self.c$", body="c$ = VALUE", at="@.c$", put="@.c$ = NEW", inside="none", drop="vars(@).pop('c$', None)", without=_CALLED | _MODULES),
    "class method": Spot("self.look$()", body="c$ = VALUE\n@classmethod\ndef look$(cls):\n    return cls.c$", at="this.OWN.c$", inside="OWN.c$ = NEW", without=_CALLED),
    "static method": Spot("self.look$()", body="@staticmethod\ndef look$():\n    return G$", file="G$ = VALUE", at="this.G$", inside="none"),
    "object's class": Spot("self.o$.c", "self.o$ = Sub$()", file="class Base$:\n    c = VALUE\n\n\nclass Sub$(Base$):\n    pass", at="this.Sub$.c", put="this.Base$.c = NEW", inside="Base$.c = NEW", without=_CALLED),
    "class in an attribute": Spot("self.o$.value", "self.o$ = Cfg$", file="class Cfg$:\n    value = VALUE", at="this.Cfg$.value", inside="Cfg$.value = NEW"),
    "list in a class": Spot("self.c$[0]", body="c$ = [VALUE]", at="this.OWN.c$[0]", inside="none"),
    "dict in a class": Spot("self.c$['k']", body="c$ = {'k': VALUE}", at="this.OWN.c$['k']", inside="none"),
    "method that is another": Spot("self.look$()", "self.look$ = closing(VALUE)", at="@.look$()", put="@.look$ = closing(NEW)", inside="none"),
    "method of a class that is another": Spot("self.look$()", body="def look$(self):\n    return VALUE", at="this.OWN.look$(None)", put="this.OWN.look$ = lambda self, v=NEW: v", inside="none"),
    "property of a class that is another": Spot("self.prop$", body="@property\ndef prop$(self):\n    return VALUE", at="this.OWN.prop$.fget(None)", put="this.OWN.prop$ = property(lambda self, v=NEW: v)", inside="none", without=_MODULES),
    "call of a class that is another": Spot("self.o$()", "self.o$ = Op$()", file="class Op$:\n    def __call__(self):\n        return VALUE", at="this.Op$.__call__(None)", put="this.Op$.__call__ = lambda self, v=NEW: v", inside="none", without=_MODULES),
    "items of a class that are others": Spot("self.o$['k']", "self.o$ = Op$()", file="class Op$:\n    def __getitem__(self, key):\n        return VALUE", at="this.Op$.__getitem__(None, 'k')", put="this.Op$.__getitem__ = lambda self, key, v=NEW: v", inside="none", without=_MODULES),
    "property of an object's class that is another": Spot("self.o$.prop", "self.o$ = Op$()", file="class Op$:\n    @property\n    def prop(self):\n        return VALUE", at="this.Op$.prop.fget(None)", put="this.Op$.prop = property(lambda self, v=NEW: v)", inside="none", without=_MODULES),
    "global": Spot("G$", file="G$ = VALUE", at="this.G$", inside="globals()['G$'] = NEW", more=("this.unread$ = 1", "this.G$ = this.G$")),
    "global by its name": Spot("globals()['G$']", file="G$ = VALUE", at="this.G$", inside="none"),
    "global object": Spot("G$.value", file="G$ = Box(VALUE)", at="this.G$.value", inside="G$.value = NEW", more=("this.G$.unread = 1",)),
    "global object that is another": Spot("G$.value", file="G$ = Box(VALUE)", at="this.G$.value", put="this.G$ = Box(NEW)", inside="none"),
    "global object's method": Spot("G$.get()", file="G$ = Box(VALUE)", at="this.G$.value", inside="G$.value = NEW"),
    "global slot": Spot("G$.value", file="G$ = Slotted(VALUE)", at="this.G$.value", inside="G$.value = NEW"),
    "global dataclass": Spot("G$.scale", file="G$ = Config(VALUE)", at="this.G$.scale", inside="G$.scale = NEW"),
    "global namespace": Spot("G$.value", file="G$ = types.SimpleNamespace(value=VALUE)", at="this.G$.value", inside="G$.value = NEW"),
    "global class": Spot("G$.value", file="class G$:\n    value = VALUE", at="this.G$.value", inside="G$.value = NEW"),
    "global file": Spot("G$.value", file="G$ = types.ModuleType('G$'); G$.value = VALUE", at="this.G$.value", inside="none"),
    "global dict": Spot("G$['k']", file="G$ = {'k': VALUE}", at="this.G$['k']", inside="G$['k'] = NEW"),
    "global dict's get": Spot("G$.get('k', VALUE)", file="G$ = {}", at="this.G$.get('k', 'none')", put="this.G$['k'] = NEW", inside="none", drop="this.G$.pop('k', None)"),
    "global dict's only item": Spot("[*G$.values()][0]", file="G$ = {'k': VALUE}", at="this.G$['k']", inside="none"),
    "global list": Spot("G$[0]", file="G$ = [VALUE, 1]", at="this.G$[0]", inside="G$[0] = NEW"),
    "global list by a loop": Spot("[v for v in G$][0]", file="G$ = [VALUE, 1]", at="this.G$[0]", inside="none"),
    "global tuple": Spot("G$[0]", file="G$ = (VALUE, 1)", at="this.G$[0]", put="this.G$ = (NEW, 1)", inside="none"),
    "global dotdict": Spot("G$.p", file="G$ = DotDict(p=VALUE)", at="this.G$.p", inside="none"),
    "global list in a dict": Spot("G$['a'][0]", file="G$ = {'a': [VALUE]}", at="this.G$['a'][0]", inside="none"),
    "global dict in an object": Spot("G$.value['a']", file="G$ = Box({'a': VALUE})", at="this.G$.value['a']", inside="none"),
    "global object in a dict": Spot("G$['a'].value", file="G$ = {'a': Box(VALUE)}", at="this.G$['a'].value", inside="none"),
    "global by a computed name": Spot("getattr(G$, 'val' + 'ue')", file="G$ = Box(VALUE)", at="this.G$.value", inside="none"),
    "global namedtuple": Spot("G$.value", file="G$ = Pair(VALUE, 1)", at="this.G$.value", put="this.G$ = Pair(NEW, 1)", inside="none"),
    "global set": Spot("next(iter(G$))", file="G$ = {VALUE}", put="this.G$.clear(); this.G$.add(NEW)", at="next(iter(this.G$))", inside="none", hashable=True),
    "global function": Spot("G$()", file="G$ = closing(VALUE)", at="this.G$()", put="this.G$ = closing(NEW)", inside="none"),
    "attribute of a function": Spot("G$.value", file="def G$():\n    pass\n\n\nG$.value = VALUE", at="this.G$.value", inside="none"),
    "closure": Spot("self.read$()", "self.read$ = closing(VALUE)", at="@.read$.__closure__[0].cell_contents", inside="none"),
    "global closure": Spot("G$()", file="G$ = closing(VALUE)", at="this.G$.__closure__[0].cell_contents", inside="none"),
    "list in a closure": Spot("G$()[0]", file="G$ = closing([VALUE])", at="this.G$.__closure__[0].cell_contents[0]", inside="none"),
    "object in a closure": Spot("G$().value", file="G$ = closing(Box(VALUE))", at="this.G$.__closure__[0].cell_contents.value", inside="none"),
    "default": Spot("G$()", file="G$ = by_default(VALUE)", at="this.G$.__defaults__[0]", put="this.G$ = by_default(NEW)", inside="none"),
    "list by default": Spot("G$()[0]", file="G$ = by_default([VALUE])", at="this.G$.__defaults__[0][0]", inside="none"),
    "object by default": Spot("G$().value", file="G$ = by_default(Box(VALUE))", at="this.G$.__defaults__[0].value", inside="none"),
    "default of a keyword": Spot("G$()", file="G$ = by_keyword(VALUE)", at="this.G$.__kwdefaults__['v']", put="this.G$ = by_keyword(NEW)", inside="none"),
    "dict by default of a keyword": Spot("G$()['k']", file="G$ = by_keyword({'k': VALUE})", at="this.G$.__kwdefaults__['v']['k']", inside="none"),
    "list by default of a held function": Spot("self.read$()[0]", "self.read$ = by_default([VALUE])", at="@.read$.__defaults__[0][0]", inside="none"),
    "partial": Spot("self.read$()", "self.read$ = functools.partial(same, VALUE)", at="@.read$.args[0]", put="@.read$ = functools.partial(same, NEW)", inside="none"),
    "partial's keyword": Spot("self.read$()", "self.read$ = functools.partial(same, v=VALUE)", at="@.read$.keywords['v']", inside="none"),
    "partial's list": Spot("self.read$()[0]", "self.read$ = functools.partial(same, [VALUE])", at="@.read$.args[0][0]", inside="none"),
    "partial's object": Spot("self.read$().value", "self.read$ = functools.partial(same, Box(VALUE))", at="@.read$.args[0].value", inside="none"),
    "global partial": Spot("G$()", file="G$ = functools.partial(same, v=VALUE)", at="this.G$.keywords['v']", inside="none"),
    "global partial's list": Spot("G$()[0]", file="G$ = functools.partial(same, [VALUE])", at="this.G$.args[0][0]", inside="none"),
    "argument": Spot("box$", file="BOX$ = VALUE", at="this.BOX$", inside="none", is_eager=True),
    "argument's item": Spot("box$['k']", file="BOX$ = {'k': VALUE}", at="this.BOX$['k']", inside="none", is_eager=True),
    "argument's attribute": Spot("box$.value", file="BOX$ = Box(VALUE)", at="this.BOX$.value", inside="none", is_eager=True),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kind:
    """Values that are read alike.

    Attributes:
        values: expressions; uses: statements that compute h with V.
        changes: of AT in place; effects: the same, by the call itself, in code.
        next: the value after V, of calls that store one.
        hashable: True if sets hold them.
        memory: True for tensors and modules, of whose memory graphs hold the address.
    """

    values: tuple[str, ...]
    uses: tuple[str, ...]
    changes: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    next: str = ""
    hashable: bool = True
    memory: bool = False


KINDS = {
    "int": Kind(("1", "2", "3", "5"), ("h = h * V", "h = h + V", "h = h if V > 2 else -h", "h = h * (V % 3 + 1)", "h = h.roll(V, -1)", "for _ in range(V):\n    h = torch.tanh(h) + 0.5", "h = h[:, :V].sum(-1, keepdim=True) + h"), next="V % 3 + 1"),
    "float": Kind(("0.5", "2.0", "-1.5", "3.25"), ("h = h * V", "h = h + V", "h = h.clamp(min=V)", "h = torch.where(h > V, h, 2 * h)", "h = h + torch.full_like(h, V)"), next="-V"),
    "odd float": Kind(("0.0", "-0.0", "float('nan')", "float('inf')"), ("h = h * (math.copysign(2, V) + 3) if V == 0 else -h", "h = h + 1 if V != V else h * 2 if V else h * (math.copysign(2, V) + 3)")),
    "bool": Kind(("True", "False"), ("h = h if V else -h", "h = h * (V + 1)", "if V:\n    h = torch.tanh(h)"), next="not V"),
    "str": Kind(("'tanh'", "'sin'", "'cosh'", "'cos'"), ("h = getattr(torch, V)(h)", "h = h * len(V)", "h = torch.tanh(h) if V == 'tanh' else h * 2 if V.startswith('c') else h"), next="V[::-1]"),
    "none or a number": Kind(("None", "2.0", "0", "False"), ("h = h if V is None else h * (V + 2)", "h = -h if V else h if V is None else h * 3"), next="None if V else 2.0"),
    "enum": Kind(("Mode.SLOW", "Mode.FAST", "Mode.OFF"), ("h = h * V.value", "h = h if V is Mode.FAST else -h", "h = h * len(V.name)"), next="Mode.FAST if V is Mode.SLOW else Mode.SLOW"),
    "integer enum": Kind(("Size.SMALL", "Size.LARGE", "2", "4"), ("h = h * V", "h = h if isinstance(V, Size) else h * V * 3")),
    "flags": Kind(("Opt.X", "Opt.X | Opt.Y", "Opt(0)", "Opt.Z | Opt.Y"), ("h = h * (2 if Opt.Y in V else 3) + V.value", "h = h + V.value"), next="V ^ Opt.Y"),
    "dtype": Kind(("torch.float32", "torch.float64", "torch.float16", "torch.int32"), ("h = (h * 4).to(V).float()", "h = h * V.itemsize")),
    "device": Kind(("torch.device('cpu')", "torch.device('cpu', 0)", "torch.device('cuda', 1)", "torch.device('meta')"), ("h = h * (2 if V.index is None else 3) * len(V.type)",)),
    "scalar of NumPy": Kind(("np.float32(2)", "np.float64(2)", "np.int64(3)", "np.bool_(True)"), ("h = h * float(V) * V.itemsize", "h = h + V.item() * len(str(V.dtype))")),
    "array": Kind(("np.array([1.0, 2.0])", "np.array([2.0, 1.0])", "np.array([1, 2])", "np.array([0.5, 2.0, 3.0])"), ("h = h * float(V.sum()) + float(V[0])", "h = h + float(V[0]) * V.itemsize", "h = h * len(V)"), ("AT[0] = 3", "AT.fill(2)", "AT.sort()", "AT[:] = AT[::-1].copy()", "np.add(AT, 1, out=AT)"), effects=("AT[0] += 1",), hashable=False),
    "statistics": Kind(("np.arange(20.0)", "np.arange(1.0, 513.0)"), ("h = h * float(V[3])", "h = h + float(V.mean())"), ("AT[3] = 9", "AT.fill(2)", "np.add(AT, 1, out=AT)"), hashable=False),
    "large array": Kind(("np.arange(1000.0)", "np.arange(1.0, 1001.0)"), ("h = h * float(V[3])",), hashable=False),
    "decimal": Kind(("decimal.Decimal('2')", "decimal.Decimal('2.50')", "decimal.Decimal('2.5')"), ("h = h * float(V) * len(str(V))",), next="V + 1"),
    "fraction": Kind(("fractions.Fraction(1, 2)", "fractions.Fraction(3, 2)"), ("h = h * float(V)",)),
    "date": Kind(("datetime.date(2020, 1, 2)", "datetime.date(2020, 1, 3)", "datetime.date(2021, 1, 2)"), ("h = h * V.day + V.year % 7",), next="V + datetime.timedelta(1)"),
    "time": Kind(("datetime.datetime(2020, 1, 2, 3)", "datetime.datetime(2020, 1, 2, 4)", "datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc)"), ("h = h * V.hour + (V.tzinfo is None)",)),
    "path": Kind(("pathlib.Path('a')", "pathlib.Path('bcd')"), ("h = h * len(V.name)",)),
    "bytes": Kind(("b'a'", "b'bcd'"), ("h = h * len(V) + V[0]",)),
    "complex": Kind(("1 + 2j", "2 + 1j"), ("h = h * V.real + V.imag",)),
    "range": Kind(("range(3)", "range(0, 3, 2)", "range(1, 3)"), ("for i in V:\n    h = h * 1.5 + i", "h = h * len(V) + V.step")),
    "slice": Kind(("slice(1)", "slice(3)", "slice(1, 3)"), ("h = h + h[:, V].sum(-1, keepdim=True)",), hashable=False),
    "class": Kind(("1", "True", "1.0", "np.float64(1.0)"), ("h = h * len(type(V).__name__)", "h = h if isinstance(V, bool) else h * 2 if type(V) is int else h * 3")),
    "type": Kind(("int", "float", "Config", "Frozen"), ("h = h * len(V.__name__)", "h = h * 2 if V is int else h * 3 if issubclass(V, Config) else h")),
    "tuple": Kind(("(1, 2)", "(2, 1)", "(1, 2, 3)", "(1, (2, 3))"), ("h = h * V[0] + len(V)", "h = h if V == (2, 1) else h * V[0]", "for v in V[:1]:\n    h = h * v + len(V)"), next="V[::-1]"),
    "list": Kind(("[1.0, 2.0]", "[2.0, 1.0]", "[1.0]", "[0.5, 2.0, 3.0]"), ("h = h * V[0] + len(V)", "h = h * sum(V) + V[0]", "for v in V:\n    h = h * 0.5 + v", "h = h * (2 if 2.0 in V else 3) + V[-1]"), ("AT.append(3.0)", "AT[0] = 3.0", "AT.reverse()", "AT.sort()", "AT.insert(0, 4.0)", "AT.pop() if len(AT) > 1 else None", "AT[:] = [2.0, 2.0]", "AT.extend([1.0, 2.0])", "AT *= 2"), effects=("AT.append(AT.pop(0) + 1)", "AT.append(1.0)", "AT[0] += 1"), hashable=False),
    "dict": Kind(("{'a': 1.0, 'b': 2.0}", "{'b': 2.0, 'a': 1.0}", "{'a': 2.0, 'c': 3.0}", "{'a': 1.0}"), ("h = h * V['a'] + len(V)", "h = h * V.get('c', 2.0)", "h = h * (2 if 'c' in V else 3)", "h = h * next(iter(V.values()))", "for key, v in V.items():\n    h = h * 0.5 + v + len(key)", "h = h * sum(V.values())"), ("AT['a'] = 3.0", "AT['c'] = 4.0", "AT.pop('c', None)", "AT.update(a=AT.pop('a'))", "AT.update(b=0.5, c=0.25)", "AT.pop('b', None)", "AT.setdefault('z', 5.0)", "AT |= {'a': -1.0}"), effects=("AT['a'] += 1", "AT['n'] = AT.get('n', 0) + 1"), hashable=False),
    "set": Kind(("{1, 2}", "{1, 3}", "{2}", "{1, 2, 3}"), ("h = h * (2 if 3 in V else 1) + len(V)", "h = h * sum(V)", "h = h * sum(v * v for v in V)"), ("AT.add(3)", "AT.discard(1)", "AT.update({4, 5})", "AT.clear(); AT.add(2)", "AT ^= {1}"), effects=("AT.add(len(AT))",), hashable=False),
    "frozen set": Kind(("frozenset({1, 2})", "frozenset({1, 3})", "frozenset()"), ("h = h * (2 if 3 in V else 1) + len(V)",)),
    "dataclass": Kind(("Config(2.0)", "Config(3.0)", "Config(2.0, 'b')"), ("h = h * V.scale + len(V.name)", "h = h * (V.scale if V.name == 'a' else 5)", "h = h * dataclasses.asdict(V)['scale']"), ("AT.scale = 4.0", "AT.name = 'abc'", "AT.scale, AT.name = 1.0, 'a'"), effects=("AT.scale += 1",), hashable=False),
    "frozen dataclass": Kind(("Frozen(2.0)", "Frozen(3.0)", "Frozen((1.0, 2.0))"), ("h = h * V.scale if isinstance(V.scale, float) else h * V.scale[1]",)),
    "object": Kind(("Box(2.0)", "Box(3.0)", "Box(Box(1.0))"), ("h = h * (V.value if isinstance(V.value, float) else 7)", "h = h * V.get() if isinstance(V.value, float) else -h"), ("AT.value = 4.0", "AT.__init__(5.0)", "AT.more = 1"), effects=("AT.value = 6.0",)),
    "nested": Kind(("{'a': [1.0, (2.0, {'x': 3.0})]}", "{'a': [1.0, (2.0, {'x': 4.0})]}", "{'a': [2.0, (2.0, {'x': 3.0})]}"), ("h = h * V['a'][1][1]['x'] + V['a'][0]",), ("AT['a'][1][1]['x'] = 5.0", "AT['a'][0] = 3.0"), hashable=False),
    "scalar tensor": Kind(("torch.tensor(2.0, device=DEVICE)", "torch.tensor(3.0, device=DEVICE)"), ("h = h * V", "h = h + V"), ("AT.fill_(3.0)", "AT.mul_(2)", "AT.data = torch.tensor(4.0, device=DEVICE)", "AT.data.copy_(torch.tensor(0.5))"), effects=("AT.mul_(1.5)",), next="V * 1.5", hashable=False, memory=True),
    "mask": Kind(("torch.ones(W, device=DEVICE)", "torch.arange(W, device=DEVICE).float()", "torch.ones(W, device=DEVICE) / 2"), ("h = h * V", "h = h + V", "h = torch.where(V > 0.7, h, -h)"), ("AT.fill_(3.0)", "AT[0] = 0", "AT.data = torch.full((W,), 2.0, device=DEVICE)", "AT.neg_()"), effects=("AT.add_(1)",), hashable=False, memory=True),
    "none or a mask": Kind(("None", "torch.ones(W, device=DEVICE)", "torch.full((W,), 2.0, device=DEVICE)"), ("h = h if V is None else h * V",), hashable=False, memory=True),
    "tensors": Kind(("(torch.ones(W, device=DEVICE), torch.arange(W, device=DEVICE).float())", "(torch.ones(W, device=DEVICE) / 2, torch.ones(W, device=DEVICE))"), ("h = h * V[0] + V[1]", "h = h + V[1]", "for v in V:\n    h = h * 0.5 + v", "h = torch.where(V[0] > 0.7, h, -h) * V[1]"), ("AT[0].fill_(3.0)", "AT[1].neg_()"), effects=("AT[0].mul_(1.5)",), next="(V[1], V[0] * 0.5 + 1)", hashable=False, memory=True),
    "named tensors": Kind(("Pair(torch.ones(W, device=DEVICE), None)", "Pair(torch.arange(W, device=DEVICE).float(), torch.ones(W, device=DEVICE))"), ("h = h * V.value if V.other is None else h * V.value + V.other", "h = h + V.value"), ("AT.value.fill_(3.0)", "AT.value[0] = 0"), next="Pair(V.value * 0.5 + 1, V.value)", hashable=False, memory=True),
    "none or tensors": Kind(("None", "(torch.ones(W, device=DEVICE), 2.0)", "(torch.ones(W, device=DEVICE), (torch.arange(W, device=DEVICE).float(), None))"), ("h = h if V is None else h * V[0] + (V[1] if isinstance(V[1], float) else V[1][0])", "h = -h if V is None else h + V[0]"), next="((h.new_ones(W), 2.0) if V is None else (V[0] * 0.5 + 1, V[1]))", hashable=False, memory=True),
    "function": Kind(("double", "halve", "torch.tanh", "torch.sin", "lambda h: h * 3", "functools.partial(scaled, by=2.0)", "functools.partial(scaled, by=4.0)", "Box(5.0).value.__mul__ and double"), ("h = V(h)",)),
    "table of functions": Kind(("{'a': double, 'b': halve}", "{'a': halve, 'b': double}", "{'a': torch.tanh, 'b': double}"), ("h = V['a'](h)",), ("AT['a'] = torch.sin", "AT.update(a=AT['b'])"), hashable=False),
    "submodule": Kind(("nn.Tanh()", "nn.Sigmoid()", "nn.Linear(W, W).to(DEVICE).requires_grad_(False)", "nn.Linear(W, W, device=DEVICE).requires_grad_(False)", "nn.Dropout(0.5)", "nn.Sequential(nn.LayerNorm(W), nn.ReLU()).to(DEVICE).requires_grad_(False)", "nn.LeakyReLU(0.5)"), ("h = V(h)",), ("AT.register_forward_hook(lambda module, args, out: out * 2)", "AT.register_forward_pre_hook(lambda module, args: (args[0] * 2,))", "AT.requires_grad_(False)", "AT.note = 1", "AT.forward = lambda h: h * 3", "AT.__class__ = nn.Identity", "AT.eval()", "AT.bias = None", "AT.weight = nn.Parameter(torch.randn(W, W, device=DEVICE), requires_grad=False)", "next(AT.parameters()).data = torch.randn(W, W, device=DEVICE)"), memory=True),
}  # fmt: skip

# Groups of an optimizer, in a step: the place in changes, and what it is given.
GROUPS = {
    "rate": ("@.opt.param_groups[0]['lr']", ("0.1", "0.05", "0.2")),
    "second group's rate": ("@.opt.param_groups[1]['lr']", ("0.1", "0.05", "0.2")),
    "decay": ("@.opt.param_groups[1]['weight_decay']", ("0.0", "0.1", "0.5")),
    "direction": ("@.opt.param_groups[0]['maximize']", ("False", "True")),
}
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(GROUPS, lr=0.1)",
    "SGD with momentum": "torch.optim.SGD(GROUPS, lr=0.1, momentum=0.9)",
    "fused Adam": "torch.optim.AdamW(GROUPS, lr=0.1, fused=True)",
    "own": "Descent(GROUPS, dict(lr=0.1, weight_decay=0.0, maximize=False))",
}
OWN_OPTIMIZER = """
class Descent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            sign = 1 if group["maximize"] else -1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + group["weight_decay"] * p, alpha=sign * group["lr"])
"""

# Where code reads a place: in the forward, a method, a function of the file, or a submodule that has the place.
WHERE = ("forward", "forward", "method", "function", "part")
FORMS = ("module", "module", "module", "mixin", "holding", "method", "function", "step")

# Places whose changes are not noticed, by what would have to be looked at.
STATE_GAPS: dict[str, frozenset[str]] = {}
# What calls do themselves is not always found at these places, nor at any place beyond a module's own if it is no plain
# value: it may be done too often or not at all.
UNDONE = frozenset(name for name, spot in SPOTS.items() if "OWN" in spot.inside or name == "object's class")
DONE_BEYOND = frozenset(
    {
        "int",
        "float",
        "bool",
        "str",
        "none or a number",
        "enum",
        "scalar of NumPy",
        "decimal",
        "fraction",
        "date",
        "tuple",
    }
)
