"""CUDA graphs for models of transformers: `graph_generation` and `graph_encoder`. Defines no models.

generate       `graph_generation`
encoding       `graph_encoder`
graphed_model  their base classes
overrides      overrides methods of a model, and restores them
masks          answers if the model is being traced, so that captures decide on masks as eager does
refusals       refuses calls by properties of the model
"""

from __future__ import annotations

from simplegraph._lazy import public_names

__all__, __getattr__ = public_names(__name__, __file__, needs="transformers")
