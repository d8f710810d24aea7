"""The shell round the core: the trainer, the inbox, the executor, the journal."""
