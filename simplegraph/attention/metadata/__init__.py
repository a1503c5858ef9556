"""The metadata of one step: read, checked, copied to the device and advanced. No attention is computed here."""
