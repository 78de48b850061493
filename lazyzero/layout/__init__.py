"""What the bytes mean: all knowledge of ZeRO and of DeepSpeed's versions lives in this room."""
