"""Compressors around a compressor: they hold an `inner` one, forward to it, and never look at its type."""
