"""From a checkpoint to files: planned without I/O, streamed through one bounded window, published whole."""
