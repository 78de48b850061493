"""Checkpoints as DeepSpeed writes them, of any stage and any shape; nothing here knows how lazyzero reads."""
