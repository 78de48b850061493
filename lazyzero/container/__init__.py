"""Where the bytes are: `.pt` archives read without executing them. Knows nothing of ZeRO."""
