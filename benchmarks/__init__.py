"""Memory and time beside DeepSpeed and cp."""
