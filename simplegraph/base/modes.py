"""Torch's modes that a forward may set around an operation, and that a replay must set again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

# Faster than reading the state of one device. Private to torch; without it, the state is read each time.
ANY_AUTOCAST: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the present autocast dtype; None without autocast."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextlib.contextmanager
def autocast_cache(*, enabled: bool) -> Iterator[None]:
    """Enable or disable autocast's cache of cast weights in the block, which starts and ends with an empty cache.

    In a capture the cache is disabled: casts made there would be pool memory, and casts from before are freed. A warmup
    runs without the cache, too, since Dynamo compiles for each state of the cache, and must not compile in a capture.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Run the library's own operators: the caller's modes do not see them, and no gradient is recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())  # first: function modes would see the others being entered
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableTorchDispatch())  # last: it takes effect when it is made
        yield


class Modes(NamedTuple):
    """Grad mode, inference mode and autocast around an operation."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """Return the modes of this thread."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_dtype(device_type))

    def changed_from(self, ambient: Modes) -> frozenset[str]:
        """Return the names of the modes that the forward itself changed; other modes follow those around a replay."""
        changed = {name for name in ("inference", "autocast") if getattr(self, name) != getattr(ambient, name)}
        return frozenset(changed | ({"grad"} if self.grad and not ambient.grad else set()))

    @contextlib.contextmanager
    def restored(self, changed: frozenset[str], device_type: str) -> Iterator[None]:
        """Re-enter the modes that the forward changed."""
        with contextlib.ExitStack() as stack:
            if "inference" in changed:
                stack.enter_context(torch.inference_mode(self.inference))
            if "grad" in changed or "inference" in changed:  # leaving inference mode switches grad mode on
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if "autocast" in changed:
                enabled = self.autocast is not None
                stack.enter_context(torch.autocast(device_type, dtype=self.autocast, enabled=enabled))
            yield
