"""Recognizes layers of models by their text, and makes forwards of fused operators for them. Changes no model."""
