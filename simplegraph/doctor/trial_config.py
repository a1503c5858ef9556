"""Settings of trials."""

from __future__ import annotations

from collections.abc import Mapping

from simplegraph.base.config import CudaGraphConfig


class TrialConfig(CudaGraphConfig):
    """Settings that environment variables do not replace: a check tries graphs even if SIMPLEGRAPH_MODE=off is set."""

    def from_env(self, environ: Mapping[str, str] | None = None) -> CudaGraphConfig:
        """Return these settings as they are."""
        return self
