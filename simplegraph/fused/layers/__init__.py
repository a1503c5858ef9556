"""Finds layers of models by examples or their class, and makes forwards of fused operators. Changes no model."""
