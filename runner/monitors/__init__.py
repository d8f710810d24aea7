"""Sources of signals; each posts events, none decides."""
