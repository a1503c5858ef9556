"""Host time of a call and of an agreement between ranks, on modules too small to keep a device busy."""
