"""Plugin for mypy, which ignores what decorators of classes return: `@cuda_graph` adds `CudaGraphWrapper` to the bases.

Name it in mypy's configuration: ``plugins = simplegraph.integrations.mypy``. Pyright needs none.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.mro import calculate_mro
from mypy.nodes import TypeInfo
from mypy.plugin import ClassDefContext, Plugin
from mypy.types import Instance

_DECORATOR = "simplegraph.serve.wrap.cuda_graph"
_BASE = "simplegraph.serve.runner.CudaGraphWrapper"


def _add_base(context: ClassDefContext) -> bool:
    """Put the mixin before the bases of a decorated class; False asks mypy to come back when it knows the mixin."""
    symbol = context.api.lookup_fully_qualified_or_none(_BASE)
    if symbol is None or not isinstance(symbol.node, TypeInfo) or not symbol.node.mro:
        return False
    info = context.cls.info
    if not info.has_base(_BASE):
        info.bases.insert(0, Instance(symbol.node, []))
        names = context.api.modules[context.api.cur_mod_id].names
        classes = [symbol.node for symbol in names.values() if isinstance(symbol.node, TypeInfo)]
        below = [node for node in classes if info in node.mro]  # subclasses in the same file have their order already
        for node in {info, *below}:
            node.mro = []  # else mypy takes it as calculated
        for node in {info, *below}:
            calculate_mro(node)
    return True


class CudaGraphPlugin(Plugin):
    """Makes classes under `@cuda_graph` wrappers for mypy."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """Return what changes a class under the decorator."""
        return _add_base if fullname == _DECORATOR else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; called by mypy."""
    return CudaGraphPlugin
