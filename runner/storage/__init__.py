"""Bytes and keys: one interface for every place where objects live."""
