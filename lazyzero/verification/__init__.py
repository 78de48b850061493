"""What `lazyzero.verify` looks at: the output's structure, its values, the frame of its archives, its checksums."""
