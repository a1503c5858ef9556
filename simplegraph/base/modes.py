"""The modes of torch that a forward may set around an operation, and that a replay must set again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

# Cheaper than the state of one device. Private to torch; where it is absent, that is asked for each time.
ANY_AUTOCAST: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The autocast dtype in force, or None."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextlib.contextmanager
def autocast_cache(*, enabled: bool) -> Iterator[None]:
    """Let autocast keep casts of weights in here, or not. Casts from before are not used; none is left.

    In a capture they would be pool memory, and ones from before are freed. The warmup does without the cache too, since
    Dynamo compiles for either state, and must not compile in the capture.
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
    """Run operators that are no work of the caller's: unseen by its modes, recorded for no gradient."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())  # first: modes of functions see the others entered
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableTorchDispatch())  # made here: it works from then on
        yield


class Modes(NamedTuple):
    """Grad mode, inference mode and autocast around an operation."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """Read those in force in this thread."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_dtype(device_type))

    def changed_from(self, ambient: Modes) -> frozenset[str]:
        """Name what the forward itself changed; for the others the modes around a replay are right."""
        changed = {name for name in ("inference", "autocast") if getattr(self, name) != getattr(ambient, name)}
        return frozenset(changed | ({"grad"} if self.grad and not ambient.grad else set()))

    @contextlib.contextmanager
    def restored(self, changed: frozenset[str], device_type: str) -> Iterator[None]:
        """Re-enter those that the forward changed."""
        with contextlib.ExitStack() as stack:
            if "inference" in changed:
                stack.enter_context(torch.inference_mode(self.inference))
            if "grad" in changed or "inference" in changed:  # leaving inference mode switches grad mode on
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if "autocast" in changed:
                enabled = self.autocast is not None
                stack.enter_context(torch.autocast(device_type, dtype=self.autocast, enabled=enabled))
            yield
